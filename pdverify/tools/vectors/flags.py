"""Flags: why a vector exists, what goes wrong without it, and where conventions differ.

What is said of public frameworks was read from their sources as of 2026; they move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdverify.registry import Registry

DPPO = "https://arxiv.org/abs/2602.04879"
PREDICTIVE = "https://arxiv.org/abs/2607.10848"
PPO = "https://arxiv.org/abs/1707.06347"
CISPO = "https://arxiv.org/abs/2506.13585"
VERL = "https://github.com/volcengine/verl"
TRL = "https://github.com/huggingface/trl"
SKYRL = "https://github.com/NovaSky-AI/SkyRL"
PRIME_RL = "https://github.com/PrimeIntellect-ai/prime-rl"
OPEN_INSTRUCT = "https://github.com/allenai/open-instruct"
SLIME = "https://github.com/THUDM/slime"


@dataclass(frozen=True)
class Flag:
    """A kind of vector.

    Attributes:
        bug_class: ``basic``, ``formula``, ``support``, ``tail``, ``precision``, ``overflow``,
            ``input`` or ``convention``.
        description: what the input or the parameter has about it.
        effect: what an implementation does wrong, and what comes of it.
        convention: the convention that the values follow, where implementations differ.
        others: the other conventions in use, with who is known to follow them.
        links: papers and public repositories.
    """

    bug_class: str
    description: str
    effect: str
    convention: str | None = None
    others: tuple[str, ...] = ()
    links: tuple[str, ...] = ()

    def note(self) -> dict[str, Any]:
        """As written under `flags` in a file of vectors."""
        return {
            "bug_class": self.bug_class,
            "convention": self.convention,
            "description": self.description,
            "effect": self.effect,
            "links": list(self.links),
            "others": list(self.others),
        }


FLAGS: Registry[Flag] = Registry("flag")

FLAGS.add(
    "Basic",
    Flag(
        "basic",
        "No trap beyond the formula itself.",
        "A wrong formula, a wrong argument order (KL is not symmetric) or a wrong unit.",
        links=(PREDICTIVE,),
    ),
)
FLAGS.add(
    "DirectionConflict",
    Flag(
        "formula",
        "The importance ratio and the coefficient C point opposite ways.",
        "A mask that tests pi_k against mu_k drops updates that lower the divergence and keeps"
        " updates that raise it.",
        links=(PREDICTIVE, DPPO),
    ),
)
FLAGS.add(
    "SampledOutsideList",
    Flag(
        "support",
        "The sampled token is not in the behavior policy's top-K list.",
        "Its mass is left in the tail, or the tail is taken for its cell: the sign of C can flip.",
        links=(PREDICTIVE,),
    ),
)
FLAGS.add(
    "SampledListedTwice",
    Flag(
        "support",
        "The sampled token is in the list already.",
        "Appended a second time, its mass is counted twice and the tail loses it twice.",
    ),
)
FLAGS.add(
    "ReplaceSupport",
    Flag(
        "convention",
        "A sampled token that is missing from the list takes its last place: K cells, not K + 1.",
        "The cells differ from those of `append`, and with them D, C and the threshold's meaning.",
        "`append`: the list and the sampled token, K + 1 cells, unless `support` says `replace`.",
        (
            "replace: the reference code of the DPPO authors and the DPPO trainer that was part of"
            " TRL's experimental trainers (as of 2026)",
        ),
        (DPPO, TRL),
    ),
)
FLAGS.add(
    "MissingTail",
    Flag(
        "tail",
        "Everything outside the list is one more cell.",
        "A sum over the list only can be negative; clamped, it says D = 0.",
        links=(DPPO,),
    ),
)
FLAGS.add(
    "EmptyTail",
    Flag(
        "tail",
        "The retained support leaves no token, or hardly one, to the tail.",
        "1 - sum is rounding noise of either sign, then floored, then in a logarithm.",
    ),
)
FLAGS.add(
    "TailFloor",
    Flag(
        "tail",
        "The training policy's tail mass is far below the last place of 1 - sum.",
        "A floor (1e-12, or the smallest float) decides D. Sum the unretained tokens instead:"
        " their logits are known.",
        links=(DPPO, TRL),
    ),
)
FLAGS.add(
    "TailEstimator",
    Flag(
        "convention",
        "C on a top-K view needs the tail's sum of pi^2, which is estimated.",
        "The estimators can disagree on the sign of C, so the token is dropped or kept by choice.",
        "The estimator that `tail` names: `aggregated` (the tail is one token), `uniform` (flat),"
        " `bracket` (drop only if both say so). `exact` sums the tail and is no convention.",
        ("a trainer implements one of them; which one is not always documented (as of 2026)",),
        (PREDICTIVE,),
    ),
)
FLAGS.add(
    "NegInfSlot",
    Flag(
        "convention",
        "The top-K list holds tokens of log-prob -inf (a truncated behavior policy).",
        "0 * inf is NaN, NaN > delta is False, and the token is kept unseen.",
        "A listed token of mass zero leaves the retained support for the tail, unless it is the"
        " sampled one.",
        (
            "the slot stays a cell of its own",
            "the batch is rejected",
            "NaN (the reference code of the DPPO authors and TRL's former DPPO trainer,"
            " as of 2026)",
        ),
        (DPPO, TRL),
    ),
)
FLAGS.add(
    "ProbabilityZero",
    Flag(
        "input",
        "-inf logits: padded vocabulary columns, or tokens that one policy cannot produce.",
        "A padded column that holds 0 takes mass; inf - inf gives NaN.",
    ),
)
FLAGS.add(
    "TruncatedSampling",
    Flag(
        "input",
        "The behavior policy was restricted to a nucleus; the training policy may not be.",
        "Identical weights look like an update: r is the kept mass, D minus its logarithm.",
    ),
)
FLAGS.add(
    "OneSidedTemperature",
    Flag(
        "input",
        "Sampling temperature was applied to one of the policies, or to both.",
        "A difference of conventions looks like an update.",
    ),
)
FLAGS.add(
    "ImpossibleInTraining",
    Flag(
        "input",
        "The sampled token has training probability zero.",
        "0 * inf in the loss or in D; the row must surface, not vanish.",
    ),
)
FLAGS.add(
    "MassNotOne",
    Flag(
        "convention",
        "The retained masses exceed one, or are all there is and are not one, by rounding.",
        "1 - sum is negative: its logarithm is NaN; or the batch is refused for its rounding.",
        "The tail's behavior mass is max(0, 1 - sum); retained masses stay as stored, in C too.",
        (
            "a floor of 1e-12 (the reference code of the DPPO authors, TRL's former DPPO trainer,"
            " as of 2026)",
            "renormalization",
            "a C that takes the sum of mu for 1",
        ),
        (DPPO, TRL),
    ),
)
FLAGS.add(
    "Identical",
    Flag(
        "precision",
        "Both policies hold the same logits, bit by bit.",
        "D and C come out as rounding noise instead of 0.",
    ),
)
FLAGS.add(
    "LowPrecisionDifference",
    Flag(
        "precision",
        "The policies differ by less than the last place of a narrow format.",
        "Probabilities, or their difference, in bf16: the sign of C is invented or lost.",
    ),
)
FLAGS.add(
    "NearCertain",
    Flag(
        "precision",
        "A probability is within 1e-2 to 1e-30 of one, or of zero.",
        "1 - p and z - logsumexp(z) lose every digit; an epsilon in a logarithm replaces it.",
        links=(VERL, SKYRL),
    ),
)
FLAGS.add(
    "CommonOffset",
    Flag(
        "precision",
        "A large number is added to all logits.",
        "exp overflows, or logsumexp(z) - z is 0.",
    ),
)
FLAGS.add(
    "NearThreshold",
    Flag(
        "precision",
        "D lies within 1e-1 to 1e-4 of the threshold.",
        "A clamp, a floor or a narrow format moves D across it.",
    ),
)
FLAGS.add(
    "VanishingProduct",
    Flag(
        "precision",
        "A * C is below the smallest number of the format.",
        "It underflows to 0 and 0 > 0 is False: compare signs, not products.",
    ),
)
FLAGS.add(
    "RatioOverflow",
    Flag(
        "overflow",
        "The importance ratio exceeds the largest float32.",
        "inf * 0 is NaN, in the loss or (with `where` after `exp`) in its gradient.",
        links=(PPO, SLIME),
    ),
)
FLAGS.add(
    "RatioCap",
    Flag(
        "convention",
        "The importance ratio in the loss is capped.",
        "The cap changes the weight of the tokens that moved most.",
        "min(r, `ratio_cap`), without gradient; no cap where it is null. No lower bound.",
        (
            "cap 3 by default, after clamping the log-ratio to [-20, 20] (verl, as of 2026)",
            "cap 20 (TRL's former DPPO trainer)",
            "no cap (prime-rl; SkyRL clamps the log-ratio to [-20, 20])",
            "a cap relative to 1 (CISPO)",
        ),
        (VERL, TRL, PRIME_RL, SKYRL, CISPO),
    ),
)
FLAGS.add(
    "RatioIsNotDistance",
    Flag(
        "formula",
        "|r - 1| is far from the total variation.",
        "E_mu |r - 1| is TWICE the total variation; at one token it is neither.",
        links=(OPEN_INSTRUCT,),
    ),
)
FLAGS.add(
    "TiedTotalVariation",
    Flag(
        "formula",
        "pi_j = mu_j exactly on some tokens.",
        "sign(0) comes out as 1, -1 or as rounding noise; it is 0 in C of the total variation.",
    ),
)
FLAGS.add(
    "ZeroAdvantage",
    Flag(
        "convention",
        "Tokens with A = 0: there is no update to drop.",
        "No effect on the loss, but on every count of dropped tokens.",
        "A = 0 keeps.",
        (
            "A = 0 takes the rule for A < 0 (verl, the reference code of the DPPO authors, TRL's"
            " former DPPO trainer, prime-rl, as of 2026)",
        ),
        (VERL, TRL, PRIME_RL, DPPO),
    ),
)
FLAGS.add(
    "StrictThreshold",
    Flag(
        "convention",
        "D equals the threshold exactly.",
        "D >= delta drops the token.",
        "Comparisons are strict: D = delta, C = 0 and r = 1 + clip keep.",
        ("drop at equality",),
        (DPPO,),
    ),
)
FLAGS.add(
    "TieAtLastPlace",
    Flag(
        "convention",
        "Several tokens tie for the K-th place of the list.",
        "The retained support depends on the sort, the batch size or the device.",
        "Exactly K tokens, equal logits by rising id.",
        ("whichever the sort returns",),
    ),
)
FLAGS.add(
    "Padding",
    Flag(
        "input",
        "Positions outside the response hold NaN; a sequence may be all padding.",
        "NaN * 0 is NaN: masking by multiplication poisons the loss.",
        links=(VERL,),
    ),
)
FLAGS.add(
    "ShardedVocabulary",
    Flag(
        "formula",
        "The vocabulary is split over two ranks.",
        "The rank that does not hold the token returns a gradient of 0.",
    ),
)
FLAGS.add(
    "LargeVocabulary",
    Flag(
        "precision",
        "Thousands of tokens: sums are long and most of the tail is tiny.",
        "Naive accumulation; blocks that do not divide the vocabulary (4,099 is prime).",
    ),
)
CONVENTIONS = frozenset(name for name, flag in FLAGS.items() if flag.convention is not None)
