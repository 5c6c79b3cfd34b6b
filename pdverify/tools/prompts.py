"""Short prompts of several kinds for sampling real tokens; written for this project."""

from __future__ import annotations

PROMPTS: dict[str, tuple[str, ...]] = {
    "arithmetic": (
        "What is 17 + 26? Show the steps.",
        "A baker sells 12 rolls a day. How many in three weeks?",
        "Compute 9 * 8 - 5.",
        "Half of a number is 21. What is the number?",
        "List the first six multiples of 7.",
        "Is 91 a prime number? Explain.",
        "A train covers 150 km in 2 hours. What is its speed?",
    ),
    "code": (
        "Write a Python function that reverses a string.",
        "def fibonacci(n):",
        "Write a SQL query that counts the rows of a table named orders.",
        "Fix this line: for i in range(10) print(i)",
        "Explain what `git rebase` does in one sentence.",
        "Write a regular expression that matches a five-digit number.",
        "Translate to C: x = [i * i for i in range(5)]",
    ),
    "story": (
        "Once upon a time, a fox found a violin in the snow.",
        "Write the opening of a story set in a lighthouse.",
        "The last robot on the farm woke up and",
        "Tell me a very short story about a lost umbrella.",
        "It was raining in the market when Mira heard",
        "Write two lines of verse about winter bread.",
        "The map showed an island that nobody had",
    ),
    "factual": (
        "What is the capital of Portugal?",
        "Why is the sky blue?",
        "Which planet has the most moons?",
        "Who wrote Don Quixote, and when?",
        "How do bees make honey?",
        "At what temperature does water boil at sea level?",
        "What does a transformer do in an electrical grid?",
    ),
    "list": (
        "Name five fruits that are red.",
        "Give three rules for writing clear emails.",
        "List the days of the week in French.",
        "What should I pack for a week in the mountains?",
        "Name four string instruments, one per line.",
        "Give three uses of an old newspaper.",
        "List some countries that border Austria.",
    ),
    "beyond ASCII": (
        "Translate into Chinese: Good morning, teacher.",
        "Continue the pattern: \U0001f642\U0001f643\U0001f642\U0001f643",
        "Write a greeting in Japanese, Korean and Arabic.",
        "Give the Greek alphabet, letter by letter.",
        "Translate into Russian: The train is late.",
        "Which emoji stand for fruit?",
        "Write pi, e and the golden ratio with their symbols.",
    ),
    "other": (
        "Translate into German: The window is open.",
        "Rewrite politely: Send me the file now.",
        "Convert to JSON: name Ada, age 36, city London",
        "Summarize in five words: The committee met for hours and decided nothing.",
        "x9 zq ?? 0x1F ~~",
        "Say something that nobody has ever said before.",
        "ELI5: inflation",
    ),
}
"""Kind -> prompts.  Kinds are taken in turn, so that any few sequences already mix them."""


def prompt(index: int) -> tuple[str, str]:
    """The `index`-th (kind, prompt) of an endless sequence that alternates between kinds."""
    kinds = list(PROMPTS)
    kind = kinds[index % len(kinds)]
    entries = PROMPTS[kind]
    return kind, entries[(index // len(kinds)) % len(entries)]
