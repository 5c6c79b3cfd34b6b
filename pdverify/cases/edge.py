"""Edge cases: faults seen in the field as inputs with their right answers, and bad inputs.

An `EdgeCase` is a small batch with right values.  Each value is a decimal of 40 digits, computed
with mpmath at 50 digits from the very bits the batch stores, by the expression that stands beside
it; `tests/cases/test_edge.py` evaluates every expression again.  An expression is read once per
valid token, with

=====================  ===========================================================================
name                   meaning
=====================  ===========================================================================
``mu``, ``pi``         the two policies over the vocabulary, from the stored logits
``k``, ``A``, ``V``    sampled token, advantage, vocabulary size
``m_k``, ``p_k``       their probabilities of `k`; from stored log-probs in a top-K or sampled view
``cells``              pairs (mu, pi): the retained support, then the tail if it holds a token
``support``            the same without the tail
``m_T``, ``p_T``       tail masses: `m_T = max(0, 1 - sum of exp(stored))`; 0 for an empty tail
``w``                  the tail's `x / pi_T` under the value's estimator
=====================  ===========================================================================

Three field faults are no batches and live elsewhere: casts to fp8 that overflow, all-zero blocks
of a scaled format (both `precision`), and 32-bit offsets into `[T, V]` arrays (`backends`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from pdverify.batch import Batch, check_threshold
from pdverify.cases.assemble import as_view, by_rank, log_softmax, round_logits
from pdverify.registry import Registry
from pdverify.rules import Partition, Rule, Tail

KL = "sum(m * log(m / p) for m, p in cells if m)"
COEFFICIENT = "p_k - m_k + sum(p * (m - p) for m, p in support) + w * (m_T - p_T)"
PRODUCT = f"A * (p_k / m_k) * ({COEFFICIENT})"
TV = "sum(abs(m - p) for m, p in cells) / 2"
TV_COEFFICIENT = (
    "(p_k * (sgn(p_k - m_k) - sum(p * sgn(p - m) for m, p in support))"
    " - sum(p * p * (sgn(p - m) - sum(q * sgn(q - n) for n, q in support))"
    " for m, p in support)) / 2"
)
BINARY_KL = "m_k * log(m_k / p_k) + (1 - m_k) * log((1 - m_k) / (1 - p_k))"
RATIO = "p_k / m_k"

Quantity = Literal[
    "divergence",
    "coefficient",
    "product",
    "importance-ratio",
    "logprob",
    "logprob-gradient",
    "loss",
    "loss-gradient",
    "tail-mass",
    "training-tail-mass",
    "topk-ids",
]


@dataclass(frozen=True)
class Right:
    """The right value of one quantity of a batch.

    Attributes:
        quantity: what it is; ``product`` is `A r C`, ``logprob`` the training log-prob of the
            sampled token, ``logprob-gradient`` its gradient at the logits of the row.
        expression: how it was computed, once per valid token; see the module's docstring.
        values: decimals of 40 digits (``inf`` where it is infinite), one per valid token, or
            `V` (`K`) per token for a gradient (ids).
        partition: the cells it is taken on: ``full``, ``topk`` or ``binary``.
        divergence: name of the divergence, where one is involved.
        tail: estimator of the tail's collision mass, where the value depends on it.
    """

    quantity: Quantity
    expression: str
    values: tuple[str, ...]
    partition: Partition = "full"
    divergence: str | None = None
    tail: Tail | None = None


@dataclass(frozen=True)
class Decision:
    """The right keep/drop decision of each valid token under a rule (True: kept)."""

    rule: Rule
    keep: tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class EdgeCase:
    """A small batch that has gone wrong somewhere, with the right answers.

    Attributes:
        name: its name in `EDGE_CASES`.
        summary: what the input is.
        goes_wrong: the class of fault: what implementations do with it instead.
        batch: the input.
        right: right values.
        decisions: right decisions.
    """

    name: str
    summary: str
    goes_wrong: str
    batch: Batch
    right: tuple[Right, ...]
    decisions: tuple[Decision, ...] = ()


@dataclass(frozen=True)
class BadInput:
    """An input that must raise `InputError` at the door.

    Attributes:
        name: its name in `BAD_INPUTS`.
        summary: what is wrong with it.
        goes_wrong: what happens where it is let in.
        argument, place: the argument and the position that the error must name.
        make: builds it, which raises.
    """

    name: str
    summary: str
    goes_wrong: str
    argument: str
    place: tuple[int, ...] | None
    make: Callable[[], object]


EDGE_CASES: Registry[EdgeCase] = Registry("edge case")
BAD_INPUTS: Registry[BadInput] = Registry("bad input")


def _logs(rows: Sequence[Sequence[float]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """`[1, T, V]` natural logarithms of probabilities; zero gives -inf."""
    with np.errstate(divide="ignore"):
        return np.log(np.asarray([rows], dtype=np.float64))


def _from_logits(
    behavior: Any,
    training: Any,
    tokens: Sequence[int],
    advantages: Sequence[float],
    top_k: int,
    dtype: str = "fp32",
) -> Batch:
    """One sequence of `T` tokens with both logits and the top-K list, as an engine derives it."""
    y, z = (round_logits(np.asarray(x, dtype=np.float64), dtype) for x in (behavior, training))
    ids = by_rank(y)[..., :top_k]
    stored = log_softmax(y.astype(np.float64)).astype(np.float32)
    sampled = np.asarray([tokens], dtype=np.int64)
    return Batch(
        tokens=sampled,
        advantages=np.asarray([advantages], dtype=np.float32),
        response_mask=np.ones(sampled.shape, dtype=bool),
        vocab_size=y.shape[-1],
        logits=z,
        behavior_logits=y,
        behavior_logprobs=np.take_along_axis(stored, sampled[..., None], axis=-1)[..., 0],
        topk_ids=ids,
        topk_logprobs=np.take_along_axis(stored, ids, axis=-1),
        dtype=dtype,
    )


def _row(
    mu: Sequence[float], pi: Sequence[float], k: int, top_k: int, advantage: float = 1.0
) -> Batch:
    """One token, from probabilities; the stored float32 logits are their logarithms."""
    return _from_logits(_logs([mu]), _logs([pi]), [k], [advantage], top_k)


def _sampled(
    logprobs: Sequence[float], behavior: Sequence[float], advantages: Sequence[float]
) -> Batch:
    """One sequence known by the sampled token's log-probs alone."""
    return Batch(
        tokens=np.zeros((1, len(logprobs)), dtype=np.int64),
        advantages=np.asarray([advantages], dtype=np.float32),
        response_mask=np.ones((1, len(logprobs)), dtype=bool),
        vocab_size=32,
        logprobs=np.asarray([logprobs], dtype=np.float32),
        behavior_logprobs=np.asarray([behavior], dtype=np.float32),
    )


def _case(
    name: str,
    summary: str,
    goes_wrong: str,
    batch: Batch,
    *right: Right,
    decisions: tuple[Decision, ...] = (),
) -> None:
    EDGE_CASES.add(name, EdgeCase(name, summary, goes_wrong, batch, right, decisions))


def _keep(rule: Rule, *keep: bool) -> Decision:
    return Decision(rule, keep)


def _predictive(tail: Tail | None = None, divergence: str = "kl", delta: float = 0.15) -> Rule:
    partition: Partition = "topk" if tail else "full"
    return Rule(
        f"predictive-{divergence}",
        "predictive",
        divergence,
        partition,
        tail,
        delta_low=delta,
        delta_high=delta,
    )


def _ratio(partition: Partition, divergence: str = "kl", delta: float = 0.15) -> Rule:
    return Rule(
        f"dppo-{partition}-{divergence}",
        "ratio",
        divergence,
        partition,
        delta_low=delta,
        delta_high=delta,
    )


_case(
    "sampled-outside-list",
    "mu = (.6, .2, .1, .06, .04), pi = (.5, .2, .1, .19, .01), K = 3, the last token sampled",
    "The tail is taken for the sampled token's cell, which flips the sign of the prediction; or the"
    " local term is kept while the mass stays in the tail.",
    _row([0.6, 0.2, 0.1, 0.06, 0.04], [0.5, 0.2, 0.1, 0.19, 0.01], 4, 3),
    Right("divergence", KL, ("0.09568391646256720718660270026178162082597",), "topk", "kl"),
    Right(
        "coefficient",
        COEFFICIENT,
        ("-0.004400000872432650706464308661924473020265",),
        "topk",
        "kl",
        "aggregated",
    ),
    Right(
        "coefficient",
        COEFFICIENT,
        ("-0.004400000872432650706464308661924473020265",),
        "topk",
        "kl",
        "uniform",
    ),
    Right(
        "coefficient",
        COEFFICIENT,
        ("-0.004400000872432650706464308661924473020265",),
        "topk",
        "kl",
        "exact",
    ),
    Right(
        "product",
        PRODUCT,
        ("-0.001100000223624421001885217581202066102287",),
        "topk",
        "kl",
        "exact",
    ),
    decisions=(_keep(_predictive("exact", delta=0.05), True),),
)

_case(
    "listed-once",
    "logits (9, 8, 7, 6), ids (0, 1), the sampled token is 0: it is in the list already",
    "The sampled token is appended a second time and the tail loses its mass twice: -0.52.",
    _from_logits([[[9.0, 8, 7, 6]]], [[[9.0, 8, 7, 6]]], [0], [1.0], 2),
    Right("tail-mass", "m_T", ("0.1192029210106942321890398607830905100213",), "topk"),
    Right("training-tail-mass", "p_T", ("0.1192029220221175559402708586976032047936",), "topk"),
)

_case(
    "no-tail-term",
    "mu = (.6, .4), pi = (.9, .1), K = 1: the tail is the other token",
    "The sum runs over the list only: -0.24, then clamped to 0.",
    _row([0.6, 0.4], [0.9, 0.1], 0, 1),
    Right("divergence", KL, ("0.3112387002533532240092317098598820247236",), "topk", "kl"),
    decisions=(_keep(_ratio("topk", delta=0.3), False),),
)

_case(
    "whole-vocabulary-retained",
    "50 tokens, K = 49, the sampled token not listed: everything is retained",
    "1 - sum of float32 masses is a small number of either sign, not an empty tail.",
    _from_logits(
        [[[-((j * 7) % 50) / 8 for j in range(50)], [-((j * 3) % 50) / 16 for j in range(50)]]],
        [[[-((j * 11) % 50) / 8 for j in range(50)], [((j * 9) % 50) / 16 for j in range(50)]]],
        [7, 33],
        [1.0, -1.0],
        49,
    ),
    Right(
        "tail-mass",
        "m_T",
        (
            "0",
            "0",
        ),
        "topk",
    ),
    Right(
        "divergence",
        KL,
        (
            "2.060721954254269340868914492730594415155",
            "0.9934062887775551155741036871696541903355",
        ),
        "topk",
        "kl",
    ),
    Right(
        "coefficient",
        COEFFICIENT,
        (
            "-0.03364674103771283377828339185227876112757",
            "0.03429645943709779802001566702931290695001",
        ),
        "topk",
        "kl",
        "aggregated",
    ),
)

_case(
    "training-tail-underflow",
    "mu keeps .05 in the tail, pi about 1e-30: 1 - sum of pi rounds to 0",
    "The tail of pi is clamped to some epsilon, and D is whatever that epsilon makes it.",
    _row([0.6, 0.35, 0.03, 0.02], [0.6, 0.4, 1e-30, 2e-30], 0, 2),
    Right("divergence", KL, ("3.202424130190441211107551103294081704652",), "topk", "kl"),
    Right("training-tail-mass", "p_T", ("2.999997178247413951890972424154247049046e-30",), "topk"),
    decisions=(_keep(_ratio("topk", delta=5.0), True),),
)

_TAIL_CLAMP_MU, _TAIL_CLAMP_PI = (0.6, 0.39, 0.01), (0.606, 0.394 - 3e-8, 3e-8)

_case(
    "training-tail-at-threshold",
    "mu = (.6, .39, .01), pi_T = 3e-8: below the last place of 1 - sum, but D depends on its log",
    "A floor of 1e-12 (or of the smallest float) gives D = .22 (.82) and drops the token.",
    _row(_TAIL_CLAMP_MU, _TAIL_CLAMP_PI, 0, 2),
    Right("divergence", KL, ("0.1172193139220839077753484036926471019006",), "topk", "kl"),
    decisions=(_keep(_ratio("topk"), True),),
)

_ln_pi = np.array([-0.6, -1.1, -2.9, -6.0])

_case(
    "neg-inf-slot",
    "ln mu = (-.5, -1.2, -3, -inf) in the list, ln pi = (-.6, -1.1, -2.9, -6): a slot of mass zero",
    "-inf - (-inf) or 0 * inf gives NaN, NaN > delta is False, and the token is kept unseen; or the"
    " slot stays a cell of its own (0.0103).",
    Batch(
        tokens=np.zeros((1, 1), dtype=np.int64),
        advantages=np.ones((1, 1), dtype=np.float32),
        response_mask=np.ones((1, 1), dtype=bool),
        vocab_size=5,
        logits=np.append(_ln_pi, np.log1p(-np.exp(_ln_pi).sum()))[None, None].astype(np.float32),
        behavior_logprobs=np.array([[-0.5]], dtype=np.float32),
        topk_ids=np.arange(4)[None, None],
        topk_logprobs=np.array([[[-0.5, -1.2, -3.0, -np.inf]]], dtype=np.float32),
    ),
    Right("divergence", KL, ("0.008620538004709061997206677142258712542093",), "topk", "kl"),
    Right(
        "coefficient",
        COEFFICIENT,
        ("-0.03809237109728086588654047182293786100768",),
        "topk",
        "kl",
        "exact",
    ),
)

_case(
    "neg-inf-slot-dropped",
    "mu = (.7, .3, 0) in a list of 3, pi = (.9, .05, .03, .02), token 1 sampled, A < 0",
    "NaN instead of D = .36, so a token that must be dropped is kept.",
    _row([0.7, 0.3, 0.0, 0.0], [0.9, 0.05, 0.03, 0.02], 1, 3, -1.0),
    Right("divergence", KL, ("0.3616077306079467250449905419000805460155",), "topk", "kl"),
    decisions=(_keep(_ratio("topk"), False), _keep(_predictive("exact"), False)),
)

_NUCLEUS = [0.5, 0.3, 0.0, 0.0, 0.0]
_WHOLE = [0.5, 0.3, 0.1, 0.07, 0.03]

_case(
    "truncated-both",
    "identical weights, both policies restricted to the top-p 0.8 support",
    "Nothing: this is how truncated sampling must be compared (r = 1, D = 0).",
    _from_logits(_logs([_NUCLEUS] * 2), _logs([_NUCLEUS] * 2), [0, 1], [1.0, -1.0], 3),
    Right(
        "divergence",
        KL,
        (
            "0",
            "0",
        ),
        "full",
        "kl",
    ),
    Right(
        "importance-ratio",
        RATIO,
        (
            "1",
            "1",
        ),
    ),
    Right(
        "coefficient",
        COEFFICIENT,
        (
            "0",
            "0",
        ),
        "full",
        "kl",
    ),
    decisions=(_keep(_predictive(delta=0.0), True, True),),
)

_case(
    "truncated-behavior",
    "identical weights, but only the behavior policy is restricted to its top-p 0.8 support",
    "r = .8 everywhere and D = -log .8: with a threshold below that, every A < 0 token is dropped.",
    _from_logits(_logs([_NUCLEUS] * 2), _logs([_WHOLE] * 2), [0, 1], [1.0, -1.0], 3),
    Right(
        "divergence",
        KL,
        (
            "0.2231435481078589894508093313005932195767",
            "0.2231435481078589894508093313005932195767",
        ),
        "full",
        "kl",
    ),
    Right(
        "importance-ratio",
        RATIO,
        (
            "0.8000000025650806171646627062632852019552",
            "0.8000000025650806171646627062632852019552",
        ),
    ),
    decisions=(_keep(_ratio("full"), True, False),),
)

_TEMPERED = [[[2 / 0.6, 1 / 0.6, 0.0]]]

_case(
    "tempered-both",
    "logits (2, 1, 0) at temperature 0.6 on both sides",
    "Nothing: r = 1 and D = 0.",
    _from_logits(_TEMPERED, _TEMPERED, [0], [1.0], 1),
    Right("divergence", KL, ("0",), "full", "kl"),
    Right("importance-ratio", RATIO, ("1",)),
)

_case(
    "tempered-training",
    "logits (2, 1, 0): training at temperature 0.6, behavior log-probs before it was applied",
    "A difference of conventions looks like an update: r = 1.23, D = 0.078.",
    _from_logits([[[2.0, 1.0, 0.0]]], _TEMPERED, [0], [1.0], 1),
    Right("divergence", KL, ("0.07816020518717199264981502090483232515469",), "full", "kl"),
    Right("importance-ratio", RATIO, ("1.227565397431007281120010605499660917046",)),
)

_case(
    "half-precision-difference",
    "mu_k = .9, pi_k = .9005 and .8989: a difference below the last place of bf16",
    "pi_k - mu_k in bf16 is .0039 and 0: the sign of C is invented or lost.",
    _from_logits(
        _logs([[0.9, 0.1]] * 2), _logs([[0.9005, 0.0995], [0.8989, 0.1011]]), [0, 0], [1.0, -1.0], 1
    ),
    Right(
        "coefficient",
        COEFFICIENT,
        (
            "0.00009949950884775419090665547138751782525162",
            "-0.000222422462829265776222397303057218800244",
        ),
        "full",
        "kl",
    ),
    Right(
        "divergence",
        BINARY_KL,
        (
            "0.000001393021030912838077547696114867817750868",
            "0.000006678880402686644854100067130935510009271",
        ),
        "binary",
        "kl",
    ),
    decisions=(_keep(_predictive(delta=0.0), False, False),),
)

_case(
    "half-precision-probabilities",
    "log mu_k = -.99609375, log pi_k = -.65234375 (both exact in bf16), delta = .15",
    "exp and the difference in bf16 give a total variation of at most .15: the token is kept.",
    _sampled([-0.65234375], [-0.99609375], [1.0]),
    Right(
        "divergence",
        "abs(p_k - m_k)",
        ("0.1515043840997092073674744773779528593364",),
        "binary",
        "tv",
    ),
    decisions=(_keep(_ratio("binary", "tv"), False),),
)

_case(
    "near-certain-equal",
    "log mu_k = log pi_k = -1e-4 in float32",
    "1 - exp(-1e-4) rounds to 0 in a narrow format: 0 / 0 in the binary KL.",
    _sampled([-1e-4], [-1e-4], [1.0]),
    Right("divergence", BINARY_KL, ("0",), "binary", "kl"),
    decisions=(_keep(_ratio("binary", delta=0.0), True),),
)

_case(
    "near-certain-gap",
    "log pi_k = -1e-4, log mu_k = -1.2e-4: the binary KL lives in the small rest",
    "An epsilon of 1e-8 in the logarithms and 1 - p in float32 give a relative error of 1e-2.",
    _sampled([-1e-4], [-1.2e-4], [1.0]),
    Right(
        "divergence",
        BINARY_KL,
        ("0.000001878474055122831787841865893043409535049",),
        "binary",
        "kl",
    ),
)

_case(
    "near-certain-logprob",
    "training logits (18, 0): the log-prob of the top token is -1.5e-8",
    "z - logsumexp(z) in float32 is 0; only the other token's logit still knows.",
    _from_logits([[[17.0, 0.0]]], [[[18.0, 0.0]]], [0], [1.0], 1),
    Right("logprob", "log(p_k)", ("-0.00000001522997962873648810150100376770802511447",)),
    Right("divergence", KL, ("0.00000001522997877178231963365339940288895188578",), "full", "kl"),
    Right(
        "coefficient", COEFFICIENT, ("7.971187287002597119515775256621885679215e-16",), "full", "kl"
    ),
    decisions=(_keep(_predictive(delta=0.0), False),),
)

_case(
    "huge-log-ratio",
    "log-ratios 1000 and 0, A = 1 for both; the first is clipped away",
    "exp overflows and inf * 0 is NaN: in the loss, or (with `where` after `exp`) in its gradient.",
    _sampled([-1.0, -1.0], [-1001.0, -1.0], [1.0, 1.0]),
    Right(
        "loss",
        "-A * p_k / m_k if p_k / m_k <= 1.2 else 0",
        (
            "0",
            "-1",
        ),
    ),
    Right(
        "loss-gradient",
        "(-A * p_k / m_k if p_k / m_k <= 1.2 else 0) / 2",
        (
            "0",
            "-0.5",
        ),
    ),
    decisions=(_keep(Rule("ppo-clip", "clip"), False, True),),
)

_case(
    "ratio-overflow",
    "log-ratio 89: the ratio 4.5e38 is above the largest float32; A = 1, 0, -1",
    "inf * 0 makes the loss of the A = 0 token NaN, and every gradient with it.",
    _sampled([-1.0] * 3, [-90.0] * 3, [1.0, 0.0, -1.0]),
    Right(
        "importance-ratio",
        RATIO,
        (
            "448961281917434524628424557964531627776.6",
            "448961281917434524628424557964531627776.6",
            "448961281917434524628424557964531627776.6",
        ),
    ),
    decisions=(_keep(Rule("ppo-clip", "clip"), False, True, True),),
)

_case(
    "phantom-column",
    "logits (-5, -6, -7) and a padded column, -inf as it must be",
    "The padded column holds 0 and takes nearly all of the mass: log-prob -5.01.",
    _from_logits([[[-5.0, -6, -7, -np.inf]]], [[[-5.0, -6, -7, -np.inf]]], [0], [1.0], 2),
    Right("logprob", "log(p_k)", ("-0.4076059644443803044829199045450704514729",)),
    Right("divergence", KL, ("0",), "full", "kl"),
)

_case(
    "sharded-gradient",
    "training logits (1, 0, 2, -1), as two shards of a vocabulary-parallel head; token 0 sampled",
    "The shard that does not hold the token returns a gradient of 0.",
    _from_logits([[[1.0, 0, 2, -1]]], [[[1.0, 0, 2, -1]]], [0], [1.0], 2),
    Right(
        "logprob-gradient",
        "[(j == k) - pi[j] for j in range(V)]",
        (
            "0.7631171819100898677019707119531821588023",
            "-0.0871443187420325674894593885662573203565",
            "-0.6439142598879723117616998532555789540086",
            "-0.03205860328008498845081147013134588443711",
        ),
    ),
)

_case(
    "zero-advantage",
    "mu = (.9, .1), pi = (.1, .9) with A = 0: far outside, but there is no update to drop",
    "A rule with A > 0 on one branch and the rest on the other counts it as masked.",
    _from_logits(_logs([[0.9, 0.1]] * 2), _logs([[0.1, 0.9], [0.1, 0.9]]), [0, 1], [0.0, 0.0], 1),
    Right(
        "divergence",
        KL,
        (
            "1.757779700385123472920361154317223641647",
            "1.757779700385123472920361154317223641647",
        ),
        "full",
        "kl",
    ),
    Right(
        "product",
        PRODUCT,
        (
            "0",
            "0",
        ),
        "full",
        "kl",
    ),
    decisions=(
        _keep(_ratio("binary", "tv"), True, True),
        _keep(_predictive(), True, True),
        _keep(Rule("ppo-clip", "clip"), True, True),
    ),
)

_case(
    "direction-against-ratio",
    "mu = (.4, .35, .25), pi = (.42, .56, .02), token 0 sampled, A = 1 and -1",
    "pi_k > mu_k, so the ratio drops the A = 1 token, whose update lowers D, and keeps the"
    " A = -1 token, whose update raises it.",
    _from_logits(
        _logs([[0.4, 0.35, 0.25]] * 2), _logs([[0.42, 0.56, 0.02]] * 2), [0, 0], [1.0, -1.0], 1
    ),
    Right(
        "divergence",
        KL,
        (
            "0.4474148348181880054822467111774134929679",
            "0.4474148348181880054822467111774134929679",
        ),
        "full",
        "kl",
    ),
    Right(
        "coefficient",
        COEFFICIENT,
        (
            "-0.1013999826562349314703975998565932291931",
            "-0.1013999826562349314703975998565932291931",
        ),
        "full",
        "kl",
    ),
    Right(
        "product",
        PRODUCT,
        (
            "-0.1064699858348207801740835146020380517407",
            "0.1064699858348207801740835146020380517407",
        ),
        "full",
        "kl",
    ),
    decisions=(_keep(_predictive(), True, False), _keep(_ratio("full"), False, True)),
)

_AGGREGATED = (
    [0.37, 0.36, 0.09, 0.08, 0.06, 0.02, 0.01, 0.01],
    [0.46, 0.05, 0.05, 0.08, 0.09, 0.09, 0.02, 0.16],
)

_case(
    "aggregated-tail-wrong",
    "six tail tokens of similar mass under pi: the aggregated x is five times too large",
    "With the tail as one token the predicted change has the wrong sign: the update is kept.",
    _row(*_AGGREGATED, 0, 2),
    Right("divergence", KL, ("0.4691959382987645824521464370899051515506",), "topk", "kl"),
    Right(
        "coefficient",
        COEFFICIENT,
        ("0.04115714923533822421561881348437438282198",),
        "topk",
        "kl",
        "exact",
    ),
    Right(
        "coefficient",
        COEFFICIENT,
        ("-0.04369998490302053020362993083946169460476",),
        "topk",
        "kl",
        "aggregated",
    ),
    Right(
        "coefficient",
        COEFFICIENT,
        ("0.04613333907664068384441382913663762544133",),
        "topk",
        "kl",
        "uniform",
    ),
    decisions=(
        _keep(_predictive("exact"), False),
        _keep(_predictive("aggregated"), True),
        _keep(_predictive("uniform"), False),
        _keep(_predictive("bracket"), True),
    ),
)

_UNIFORM = (
    [0.22, 0.21, 0.17, 0.12, 0.12, 0.09, 0.06, 0.01],
    [0.27, 0.01, 0.02, 0.04, 0.06, 0.01, 0.57, 0.02],
)

_case(
    "uniform-tail-wrong",
    "one tail token holds most of pi's tail: the uniform x is five times too small",
    "With a flat tail the predicted change has the wrong sign: the update is dropped.",
    _row(*_UNIFORM, 0, 2),
    Right("divergence", KL, ("0.4611344986642596261968804918082076105605",), "topk", "kl"),
    Right(
        "coefficient",
        COEFFICIENT,
        ("-0.03045832929920613104463149192686495514739",),
        "topk",
        "kl",
        "exact",
    ),
    Right(
        "coefficient",
        COEFFICIENT,
        ("-0.069499994839806547834799169002215652055",),
        "topk",
        "kl",
        "aggregated",
    ),
    Right(
        "coefficient",
        COEFFICIENT,
        ("0.0205000040588897088665419427046585236332",),
        "topk",
        "kl",
        "uniform",
    ),
    decisions=(
        _keep(_predictive("exact"), True),
        _keep(_predictive("aggregated"), True),
        _keep(_predictive("uniform"), False),
        _keep(_predictive("bracket"), True),
    ),
)

_case(
    "common-offset",
    "float32 logits (1e8, 1e8) on both sides",
    "logsumexp(z) - z is 0: the log of 2 is below the last place of 1e8.",
    _from_logits([[[1e8, 1e8]]], [[[1e8, 1e8]]], [0], [1.0], 1),
    Right("logprob", "log(p_k)", ("-0.6931471805599453094172321214581765680755",)),
    Right("divergence", KL, ("0",), "full", "kl"),
)

_case(
    "tie-at-last-place",
    "bf16 logits (2, 1, 1, 1, 0), K = 2: three tokens tie for the second place",
    "The retained support depends on the sort, the batch size or the device.",
    _from_logits([[[2.0, 1, 1, 1, 0]]], [[[2.0, 1, 1, 1, 0]]], [0], [1.0], 2, "bf16"),
    Right(
        "topk-ids",
        "sorted(range(V), key=lambda j: (-mu[j], j))[:2]",
        (
            "0",
            "1",
        ),
        "topk",
    ),
    Right("tail-mass", "m_T", ("0.3890596027634257858429186989286883739952",), "topk"),
)

_case(
    "sampled-takes-last-place",
    "mu = (.9, .1, 0), pi = (.5, .1, .4), K = 1, token 1 sampled",
    "With the sampled token in the list's only place the cells are {k, rest} and D is 0.",
    _row([0.9, 0.1, 0.0], [0.5, 0.1, 0.4], 1, 1),
    Right("divergence", KL, ("0.5290079896116541223279272187551687213768",), "full", "kl"),
)

_case(
    "sampled-impossible-in-training",
    "pi_k = 0 for the sampled token (-inf logit): the ratio is 0, forward KL infinite, C finite",
    "0 * inf in the loss or in D; the row must surface, not vanish.",
    _row([0.5, 0.3, 0.2], [0.0, 0.6, 0.4], 0, 1, -1.0),
    Right("importance-ratio", RATIO, ("0",)),
    Right("divergence", "inf", ("inf",), "full", "kl"),
    Right("divergence", TV, ("0.5000000043521170337006327398970438107981",), "full", "tv"),
    Right(
        "coefficient", COEFFICIENT, ("-0.7600000074758307128543221180118838095591",), "full", "kl"
    ),
)

_case(
    "total-variation-not-ratio",
    "mu_k = .5, pi_k = .7, bound .3",
    "|r - 1| = .4 is taken for the total variation (.2), and the token is dropped.",
    _row([0.5, 0.5], [0.7, 0.3], 0, 1),
    Right("divergence", TV, ("0.2000000035040777018391194968502161015566",), "full", "tv"),
    decisions=(_keep(_ratio("binary", "tv", delta=0.3), True),),
)

_HALVES = ([0.0, 0.0, -np.inf, -np.inf, -np.inf], [0.0, 0.0, 0.0, 0.0, -np.inf])

_case(
    "exactly-at-threshold",
    "mu uniform on 2 tokens, pi on 4: the total variation is 1/2 exactly, delta = 1/2 and 7/16",
    "D >= delta instead of D > delta drops the token at the threshold.",
    _from_logits([[_HALVES[0]]], [[_HALVES[1]]], [0], [-1.0], 2),
    Right("divergence", TV, ("0.5",), "full", "tv"),
    Right("coefficient", TV_COEFFICIENT, ("-0.125",), "full", "tv"),
    decisions=(
        _keep(_predictive(divergence="tv", delta=0.5), True),
        _keep(_predictive(divergence="tv", delta=0.4375), False),
    ),
)

_SWAP = ([2.0, 1.0, 0.0, -1.0], [2.0, 0.0, 1.0, -1.0])

_case(
    "tied-total-variation",
    "pi is mu with tokens 1 and 2 swapped: pi_j = mu_j exactly on tokens 0 and 3",
    "sign(0) comes out as +1 or -1 (or as rounding noise): at a kink the convention is 0.",
    _from_logits([[_SWAP[0]]], [[_SWAP[1]]], [0], [1.0], 2),
    Right("divergence", TV, ("0.1497384993478775648085698994805605208412",), "full", "tv"),
    Right(
        "coefficient",
        TV_COEFFICIENT,
        ("-0.03657965295416009624646198365365850607748",),
        "full",
        "tv",
    ),
)

_case(
    "retained-mass-above-one",
    "stored log-probs of (.42, .58) in float32: their masses sum to 1 + 2.7e-8",
    "1 - sum is negative: log of a negative number, or a batch refused for its rounding.",
    replace(
        as_view(_row([0.42, 0.58, 0.0], [0.5, 0.4, 0.1], 0, 2), "topk"),
        behavior_logprobs=np.log(np.array([[0.42]])).astype(np.float32),
        topk_logprobs=np.log(np.array([[[0.58, 0.42]]])).astype(np.float32),
    ),
    Right("tail-mass", "m_T", ("0",), "topk"),
    Right("divergence", KL, ("0.1422784731342576754227918886248304626248",), "topk", "kl"),
)

_case(
    "vanishing-product",
    "A is the smallest positive float32 and its negative, C about .2, D above the threshold",
    "A * C underflows to 0 in float32, 0 > 0 is False, and the A > 0 token is kept.",
    _from_logits(
        _logs([[0.25, 0.7, 0.05]] * 2),
        _logs([[0.6, 0.2, 0.2]] * 2),
        [0, 0],
        [2.0**-149, -(2.0**-149)],
        1,
    ),
    Right(
        "divergence",
        KL,
        (
            "0.588752189346801183951999375768939668206",
            "0.588752189346801183951999375768939668206",
        ),
        "full",
        "kl",
    ),
    Right(
        "coefficient",
        COEFFICIENT,
        (
            "0.2100000010086572674007021925172627672611",
            "0.2100000010086572674007021925172627672611",
        ),
        "full",
        "kl",
    ),
    decisions=(_keep(_predictive(), False, True),),
)


def _poisoned_padding() -> Batch:
    """The first sequence has one valid token, the second none; every padded float is NaN."""
    one = _row([0.4, 0.35, 0.25], [0.42, 0.56, 0.02], 0, 1, -1.0)

    def spread(x: Any) -> Any:
        fill = np.nan if x.dtype.kind == "f" else 0
        padded = np.full((2, 3, *x.shape[2:]), fill, dtype=x.dtype)
        padded[0, 1] = x[0, 0]
        return padded

    arrays: dict[str, Any] = {
        name: spread(x) for name, x in vars(one).items() if isinstance(x, np.ndarray)
    }
    return replace(one, **arrays)


_case(
    "poisoned-padding",
    "one valid token among NaN padding, and a sequence that is all padding",
    "NaN * 0 is NaN: masking by multiplication poisons the loss; an empty sequence divides by 0.",
    _poisoned_padding(),
    Right("divergence", KL, ("0.4474148348181880054822467111774134929679",), "full", "kl"),
    Right("product", PRODUCT, ("0.1064699858348207801740835146020380517407",), "full", "kl"),
    decisions=(_keep(_predictive(), False),),
)


def _plain() -> Batch:
    """Two sequences of two tokens, V = 5, K = 3: what the bad inputs are made from."""
    y = np.array([[[0.0, -1, -2, -3, -4], [-1, 0, -2, -3, -4]]] * 2)
    z = y + np.array([0.25, 0.0, -0.25, 0.0, 0.5])
    whole = _from_logits(y[0][None], z[0][None], [0, 4], [1.0, -1.0], 3)
    twice: dict[str, Any] = {
        name: np.concatenate([x, x]) for name, x in vars(whole).items() if isinstance(x, np.ndarray)
    }
    return replace(whole, **twice)


def _bad(
    name: str,
    summary: str,
    goes_wrong: str,
    argument: str,
    place: tuple[int, ...] | None,
    make: Callable[[], object],
) -> None:
    BAD_INPUTS.add(name, BadInput(name, summary, goes_wrong, argument, place, make))


def _changed(**fields: Any) -> Callable[[], Batch]:
    """`_plain` with other fields."""
    return lambda: replace(_plain(), **fields)


def _poked(name: str, place: tuple[Any, ...], value: Any) -> Callable[[], Batch]:
    """`_plain` with one entry of one array changed."""

    def make() -> Batch:
        plain = _plain()
        array = getattr(plain, name).copy()
        array[place] = value
        return replace(plain, **{name: array})

    return make


def _placeholder_row() -> Batch:
    plain = _plain()
    assert plain.topk_ids is not None
    assert plain.topk_logprobs is not None
    ids, stored = plain.topk_ids.copy(), plain.topk_logprobs.copy()
    ids[1, 0], stored[1, 0] = 0, 0.0
    return replace(plain, topk_ids=ids, topk_logprobs=stored)


def _overfull_row() -> Batch:
    plain = _plain()
    assert plain.topk_logprobs is not None
    stored = plain.topk_logprobs.copy()
    stored[0, 1] = np.log([0.6, 0.3, 0.2])
    return replace(plain, topk_logprobs=stored)


_KEPT = "NaN > delta is False, so the mask keeps the token."

_bad(
    "nan-logit",
    "one NaN among the training logits",
    _KEPT,
    "logits",
    (1, 0, 2),
    _poked("logits", (1, 0, 2), np.nan),
)
_bad(
    "nan-behavior-logit",
    "one NaN among the behavior logits",
    _KEPT,
    "behavior_logits",
    (0, 1, 3),
    _poked("behavior_logits", (0, 1, 3), np.nan),
)
_bad(
    "inf-logit",
    "a training logit of +inf",
    "inf - inf in the softmax.",
    "logits",
    (0, 0, 4),
    _poked("logits", (0, 0, 4), np.inf),
)
_bad(
    "no-policy",
    "a row of training logits that are all -inf",
    "0 / 0 in the softmax.",
    "logits",
    (0, 1),
    _poked("logits", (0, 1), -np.inf),
)
_bad(
    "sampled-impossible",
    "the sampled token has behavior logit -inf",
    "The ratio is infinite: the token cannot have been sampled from this policy.",
    "behavior_logits",
    (1, 1, 4),
    _poked("behavior_logits", (1, 1, 4), -np.inf),
)
_bad(
    "sampled-impossible-stored",
    "the sampled token has stored behavior log-prob -inf",
    "The ratio is infinite, or NaN times a mask of 0.",
    "behavior_logprobs",
    (1, 1),
    _poked("behavior_logprobs", (1, 1), -np.inf),
)
_bad(
    "nan-advantage",
    "an advantage of NaN",
    "Every comparison is False: kept, with a NaN loss.",
    "advantages",
    (0, 1),
    _poked("advantages", (0, 1), np.nan),
)
_bad(
    "missing-logprob",
    "a stored behavior log-prob of NaN (missing)",
    "Replaced by some number, the ratio becomes an invention.",
    "behavior_logprobs",
    (1, 0),
    _poked("behavior_logprobs", (1, 0), np.nan),
)
_bad(
    "positive-logprob",
    "a stored log-prob above 0",
    "A probability above 1.",
    "topk_logprobs",
    (0, 1, 2),
    _poked("topk_logprobs", (0, 1, 2), 0.5),
)
_bad(
    "placeholder-float-min",
    "the lowest float32 as a log-prob instead of -inf",
    "Placeholder minus placeholder is a ratio of 1; a cast to a narrower format overflows.",
    "topk_logprobs",
    (1, 1, 2),
    _poked("topk_logprobs", (1, 1, 2), np.finfo(np.float32).min),
)
_bad(
    "placeholder-9999",
    "-9999 as a log-prob instead of -inf",
    "Placeholder minus placeholder is a ratio of 1.",
    "topk_logprobs",
    (1, 0, 1),
    _poked("topk_logprobs", (1, 0, 1), -9999.0),
)
_bad(
    "placeholder-row",
    "a top-K row whose ids and log-probs are all 0",
    "K tokens of probability 1: a total variation of K / 2.",
    "topk_ids",
    (1, 0, 1),
    _placeholder_row,
)
_bad(
    "listed-twice",
    "an id listed twice in the top-K list",
    "Its mass counts twice and the tail goes negative.",
    "topk_ids",
    (0, 0, 1),
    _poked("topk_ids", (0, 0, 1), 0),
)
_bad(
    "id-too-large",
    "a top-K id equal to V",
    "Reads past the row, or a padded column.",
    "topk_ids",
    (0, 1, 2),
    _poked("topk_ids", (0, 1, 2), 5),
)
_bad(
    "id-negative",
    "a top-K id of -1",
    "Reads the last column.",
    "topk_ids",
    (1, 1, 0),
    _poked("topk_ids", (1, 1, 0), -1),
)
_bad(
    "token-too-large",
    "a sampled token equal to V",
    "Reads past the row.",
    "tokens",
    (0, 1),
    _poked("tokens", (0, 1), 5),
)
_bad(
    "token-negative",
    "a sampled token of -100 (an ignored label) on a valid position",
    "Reads another column.",
    "tokens",
    (1, 0),
    _poked("tokens", (1, 0), -100),
)
_bad(
    "overfull-list",
    "retained masses that sum to 1.1",
    "The tail mass is negative, then clamped: D is too small.",
    "topk_logprobs.sum",
    (0, 1),
    _overfull_row,
)
_bad(
    "two-values",
    "the sampled token has one log-prob in the list and another beside it",
    "The local term and the sum disagree on mu_k, which can flip the sign of C.",
    "topk_logprobs",
    (0, 0, 0),
    _poked("behavior_logprobs", (0, 0), -3.0),
)
_bad(
    "shifted-by-one",
    "log-probs of one position fewer than tokens",
    "Read one slot late: a huge, rare KL.",
    "behavior_logprobs.shape",
    None,
    lambda: replace(_plain(), behavior_logprobs=np.full((2, 1), -1.0, dtype=np.float32)),
)
_bad(
    "transposed-logits",
    "logits of shape [L, V, B]",
    "Broadcasts silently where sizes agree.",
    "logits.shape",
    None,
    lambda: replace(_plain(), logits=np.zeros((2, 5, 2), dtype=np.float32)),
)
_bad(
    "flat-tokens",
    "tokens of shape [T]",
    "Broadcasts against [B, L].",
    "tokens.shape",
    None,
    _changed(tokens=np.zeros(4, dtype=np.int64)),
)
_bad(
    "lists-of-other-lengths",
    "K ids but K - 1 log-probs",
    "The last ones are lost or misaligned.",
    "topk_logprobs.shape",
    None,
    lambda: replace(_plain(), topk_logprobs=np.full((2, 2, 2), -1.0, dtype=np.float32)),
)
_bad(
    "float-tokens",
    "tokens as floats",
    "Ids above 2^24 change in float32.",
    "tokens.dtype",
    None,
    _changed(tokens=np.zeros((2, 2), dtype=np.float32)),
)
_bad(
    "integer-mask",
    "the response mask as 0 and 1",
    "~1 is -2, which is true.",
    "response_mask.dtype",
    None,
    _changed(response_mask=np.ones((2, 2), dtype=np.int64)),
)
_bad(
    "half-logits",
    "logits as an array of float16",
    "What is computed from it stays float16.",
    "logits.dtype",
    None,
    lambda: replace(_plain(), logits=np.zeros((2, 2, 5), dtype=np.float16)),
)
_bad(
    "empty-batch",
    "no position at all",
    "A mean over nothing is NaN.",
    "response_mask",
    None,
    lambda: Batch(
        tokens=np.zeros((0, 4), dtype=np.int64),
        advantages=np.zeros((0, 4), dtype=np.float32),
        response_mask=np.zeros((0, 4), dtype=bool),
        vocab_size=5,
        logits=np.zeros((0, 4, 5), dtype=np.float32),
        behavior_logits=np.zeros((0, 4, 5), dtype=np.float32),
    ),
)
_bad(
    "all-padding",
    "no valid position",
    "A mean over nothing is NaN.",
    "response_mask",
    None,
    _changed(response_mask=np.zeros((2, 2), dtype=bool)),
)
_bad(
    "whole-vocabulary-listed",
    "K = V",
    "There is no tail, and 1 - sum is rounding noise.",
    "topk_ids.shape",
    None,
    lambda: replace(
        _plain(),
        topk_ids=np.tile(np.arange(5), (2, 2, 1)),
        topk_logprobs=np.full((2, 2, 5), -2.0, dtype=np.float32),
    ),
)
_bad(
    "empty-list",
    "K = 0",
    "Everything is tail.",
    "topk_ids.shape",
    None,
    lambda: replace(
        _plain(),
        topk_ids=np.zeros((2, 2, 0), dtype=np.int64),
        topk_logprobs=np.zeros((2, 2, 0), dtype=np.float32),
    ),
)
_bad(
    "one-token-vocabulary",
    "V = 1",
    "Nothing can move.",
    "vocab_size",
    None,
    lambda: Batch(
        tokens=np.zeros((1, 1), dtype=np.int64),
        advantages=np.zeros((1, 1), dtype=np.float32),
        response_mask=np.ones((1, 1), dtype=bool),
        vocab_size=1,
        logits=np.zeros((1, 1, 1), dtype=np.float32),
        behavior_logits=np.zeros((1, 1, 1), dtype=np.float32),
    ),
)
_bad(
    "unknown-format",
    "a format name that is not in the registry",
    "No unit roundoff is known.",
    "dtype",
    None,
    _changed(dtype="float17"),
)
_bad(
    "ids-alone",
    "top-K ids without their log-probs",
    "The masses are unknown.",
    "topk_logprobs",
    None,
    _changed(topk_logprobs=None),
)
_bad(
    "list-without-sampled",
    "a top-K list without the sampled token's log-prob",
    "A sampled token outside the list has no mass.",
    "behavior_logprobs",
    None,
    _changed(behavior_logprobs=None),
)
_bad(
    "no-training-policy",
    "neither logits nor log-probs of the training policy",
    "Nothing to compare.",
    "logits",
    None,
    _changed(logits=None),
)
_bad(
    "no-behavior-policy",
    "neither logits nor log-probs of the behavior policy",
    "Nothing to compare.",
    "behavior_logprobs",
    None,
    _changed(behavior_logits=None, behavior_logprobs=None, topk_ids=None, topk_logprobs=None),
)
_bad(
    "negative-threshold",
    "delta = -0.1",
    "Every token is outside.",
    "delta",
    None,
    lambda: check_threshold("delta", -0.1),
)
_bad(
    "nan-threshold",
    "delta = NaN",
    "Every comparison is False: nothing is ever dropped.",
    "delta_high",
    None,
    lambda: check_threshold("delta_high", float("nan")),
)
