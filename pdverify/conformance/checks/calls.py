"""Checks on the call itself: form of the answer, layout and dtype of the inputs, side effects."""

from __future__ import annotations

from collections.abc import Iterator

from pdverify.conformance.checks.entry import check, reads_logits
from pdverify.conformance.plan import Plan
from pdverify.conformance.questions import Question


def _far(plan: Plan, **options: object) -> Iterator[Question]:
    size = {"vocab_size": 65, "top_k": plan.options.top_k or 6}
    yield from plan.ordinary("far-apart", **size, **options)


@check(
    "output.form",
    "shapes and dtypes of the answer",
    formula="keep bool [B, L]; divergence, coefficient [B, L]; loss [B, L], or a scalar",
    bug="a flattened, transposed or squeezed answer, a float mask, NaN",
)
def form(plan: Plan) -> Iterator[Question]:
    """A batch of two sequences of three tokens, and one of three sequences of two: the answer has
    the shape [B, L] of the tokens. What it says is judged elsewhere."""
    for sequences, length in ((2, 3), (3, 2)):
        material = plan.material(
            "peaked",
            sequences=sequences,
            length=length,
            vocab_size=33,
            top_k=plan.options.top_k or 5,
        )
        yield plan.question(f"B = {sequences}, L = {length}", material, plan.rule, judges=())


@check(
    "input.strides",
    "non-contiguous inputs",
    formula="the answer depends on values, not on their layout in memory",
    bug="view, data_ptr or a kernel that assumes contiguous memory",
    gated=True,
)
def strides(plan: Plan) -> Iterator[Question]:
    """Every tensor is a transposed, strided view of a larger one, as slices of a packed batch or
    of shifted logits are."""
    yield from _far(plan, presentation="strided")


@check(
    "input.unmodified",
    "inputs are left as they were",
    formula="every argument is bitwise the same after the call",
    bug="in-place arithmetic on logits, log-probs or advantages",
)
def unmodified(plan: Plan) -> Iterator[Question]:
    """Every argument is compared with a copy that was taken before the call."""
    yield from _far(plan, presentation="guarded", judges=())


@check(
    "input.determinism",
    "the same input twice gives the same answer",
    formula="two calls, bitwise equal answers",
    bug="hidden state between calls, randomness, uninitialized memory",
)
def determinism(plan: Plan) -> Iterator[Question]:
    """Each batch is handed over twice."""
    yield from _far(plan, presentation="repeated", judges=())


@check(
    "input.bf16",
    "bfloat16 logits",
    formula="bf16 logits are exact numbers; arithmetic happens at the declared precision",
    bug="no upcast: softmax and sums in bf16",
    examples=("mu_k = .9000 and pi_k = .8989 have difference 0 in bf16",),
    applies=reads_logits,
    gated=True,
)
def bf16(plan: Plan) -> Iterator[Question]:
    """Logits stored in bfloat16, as a trainer under autocast has them. The oracle takes them as
    the numbers they are, so a target that upcasts first is held to its declared precision; some
    thresholds are as close to a token's D as that can tell."""
    for family in ("peaked", "direction-conflict"):
        yield from plan.ordinary(family, vocab_size=65, top_k=plan.options.top_k or 6, dtype="bf16")
    yield from plan.near(dtype="bf16")


@check(
    "input.fp16",
    "float16 logits",
    formula="as input.bf16",
    bug="no upcast: exp overflows at 65,504, small probabilities flush to 0",
    applies=reads_logits,
    gated=True,
)
def fp16(plan: Plan) -> Iterator[Question]:
    """Logits stored in float16: their range ends at 65,504, and below 2^-14 they lose digits."""
    for family in ("peaked", "far-apart"):
        yield from plan.ordinary(family, vocab_size=65, top_k=plan.options.top_k or 6, dtype="fp16")
    yield from plan.near(dtype="fp16")
