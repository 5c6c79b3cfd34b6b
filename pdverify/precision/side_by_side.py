"""The forms of C side by side: bits that each keeps in the same arithmetic, and what it costs.

Inputs are taken as exact after they were rounded to a format, so that differences are those of
the forms alone.  Times are of plain torch code in fp32, written below form by form; the tests hold
it to the same values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pdverify.batch import Rows
from pdverify.cases import build
from pdverify.conformance.truth import Progress
from pdverify.oracle import Judge
from pdverify.precision.certify import Estimate, decision, sign
from pdverify.precision.evaluate import Arithmetic, Evaluation
from pdverify.precision.forms import FORMS
from pdverify.precision.records import FormRow, Options
from pdverify.precision.stages import Setting, prepare, source_of
from pdverify.precision.statistics import correct_bits, middle_of, rate

if TYPE_CHECKING:
    from torch import Tensor

Float64: TypeAlias = NDArray[np.float64]

KINDS = ("flat", "zipf", "peaked", "near-one-hot", "near-equal")
"""Input families, from flat to peaked, and one whose policies are nearly the same."""

COMPUTED = (("fp32", "fp32"), ("bf16", "fp32"), ("fp16", "fp32"), ("bf16", "bf16"))
"""Formats of inputs and of arithmetic; sums are fp32."""

SIZES = {"quick": (1_000, 32), "full": (151_936, 24)}
"""Vocabulary and tokens by level."""

ROUNDS = 7
"""Interleaved rounds of a timing."""


def compare_forms(options: Options, progress: Progress) -> Iterator[FormRow]:
    """Every form on every kind of rows, in the full view."""
    size, tokens = SIZES[options.level]
    size, tokens = options.vocab_size or size, options.tokens or tokens
    wanted = options.divergences or (("kl",) if options.level == "quick" else TIMED)
    for done, kind in enumerate(KINDS):
        progress(f"forms: {kind}, V = {size:,}", done, len(KINDS))
        batch = build(
            kind,
            options.seed,
            sequences=-(-tokens // 8),
            length=8,
            vocab_size=size,
            top_k=20,
            dtype="fp32",
        )
        source = source_of(kind, batch)
        for inputs, arithmetic in COMPUTED:
            stored = None if inputs == "fp32" else inputs
            rows = prepare(source, Setting(logits=stored)).rows
            evaluation = Evaluation(rows, Arithmetic(arithmetic, "fp32"))
            for name in wanted:
                yield from _forms(kind, inputs, arithmetic, name, rows, evaluation)


def _forms(
    kind: str, inputs: str, arithmetic: str, name: str, rows: Rows, evaluation: Evaluation
) -> Iterator[FormRow]:
    judge = Judge(rows)
    true_d, true_c = judge.divergence(name, "full"), judge.coefficient(name, "full", None)
    delta = np.full(len(rows), np.median(true_d.mid[np.isfinite(true_d.mid)]))
    none = np.zeros(len(rows))
    d = Estimate(evaluation.divergence(name, "full").value, none, none)
    forms = [x for x, form in FORMS.items() if name in form.divergences]
    timed = arithmetic == "fp32" and inputs == "fp32"
    ratios = time_ratios(name, rows) if timed else {}
    assert rows.logits is not None
    z = rows.logits - rows.logits.max(axis=-1, keepdims=True)
    peak = float(np.median(1 / np.exp(z).sum(axis=-1)))
    for form in forms:
        c = Estimate(evaluation.coefficient(name, "full", None, form).value, none, none)
        of_sign = sign(c, true_c)
        taken = decision(d, c, true_d, true_c, rows.advantages, delta)
        bits = correct_bits(c.value, true_c)[of_sign.judged]
        middle, low, high = middle_of(bits)
        yield FormRow(
            divergence=name,
            form=form,
            inputs=inputs,
            arithmetic=arithmetic,
            peakedness=kind,
            peak=peak,
            vocab_size=rows.vocab_size,
            tokens=len(bits),
            bits=middle,
            bits_low=low,
            bits_high=high,
            worst_bits=float(np.quantile(bits, 0.05)),
            wrong_signs=rate(of_sign.flipped, of_sign.judged),
            wrong_decisions=rate(taken.flipped, taken.judged),
            seconds_ratio=ratios.get(form),
        )


def time_ratios(name: str, rows: Rows) -> dict[str, float]:
    """Time of each form over that of the plain one: medians of interleaved rounds."""
    import torch

    assert rows.logits is not None
    assert rows.behavior_logits is not None
    z, y = (torch.from_numpy(x).float() for x in (rows.logits, rows.behavior_logits))
    k = torch.from_numpy(rows.tokens)[:, None]
    ways = _WAYS[name]
    seconds: dict[str, list[float]] = {form: [] for form in ways}
    for round_ in range(ROUNDS + 1):
        for form, way in ways.items():
            started = time.perf_counter()
            way(z, y, k)
            if round_:  # the first one warms up
                seconds[form].append(time.perf_counter() - started)
    medians = {form: float(np.median(x)) for form, x in seconds.items()}
    return {form: x / medians["plain"] for form, x in medians.items()}


def _softmax(z: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and masses."""
    log_p = z.log_softmax(-1)
    return log_p, log_p.exp()


def _direct(z: Tensor, y: Tensor) -> Tensor:
    """Log-ratios from differences of logits."""
    dz, dy = z - z.amax(-1, keepdim=True), y - y.amax(-1, keepdim=True)
    return (dz - dy) - (dz.logsumexp(-1, keepdim=True) - dy.logsumexp(-1, keepdim=True))


def _complement(h: Tensor, pi: Tensor, k: Tensor) -> Tensor:
    h_k, pi_k = h.gather(-1, k), pi.gather(-1, k)
    others = pi.scatter(-1, k, 0.0)
    eps, q = others.sum(-1, keepdim=True), (others * others).sum(-1, keepdim=True)
    rest = (h * (others + (pi_k * eps - q))).scatter(-1, k, 0.0)
    return (h_k * (eps * eps + q))[:, 0] - rest.sum(-1)


def _kl_plain(z: Tensor, y: Tensor, k: Tensor) -> Tensor:
    pi, mu = z.softmax(-1), y.softmax(-1)
    return (pi - mu).gather(-1, k)[:, 0] + (pi * (mu - pi)).sum(-1)


def _kl_moments(z: Tensor, y: Tensor, k: Tensor) -> Tensor:
    a, b = (z - z.amax(-1, keepdim=True)).exp(), (y - y.amax(-1, keepdim=True)).exp()
    s, m = a.sum(-1), b.sum(-1)
    a, b = a.scatter_(-1, k, 0.0), b.scatter_(-1, k, 0.0)
    first, other = a.sum(-1) / s, b.sum(-1) / m
    return first * (other - first) + (a * b).sum(-1) / (s * m) - (a * a).sum(-1) / (s * s)


def _plain(g: Tensor, pi: Tensor, k: Tensor) -> Tensor:
    centered = g - (pi * g).sum(-1, keepdim=True)
    return (pi * centered).gather(-1, k)[:, 0] - (pi * pi * centered).sum(-1)


def _reverse_plain(z: Tensor, y: Tensor, k: Tensor) -> Tensor:
    log_pi, pi = _softmax(z)
    return _plain(log_pi - y.log_softmax(-1), pi, k)


def _reverse_complement(z: Tensor, y: Tensor, k: Tensor) -> Tensor:
    log_pi, pi = _softmax(z)
    return _complement(pi * (log_pi - y.log_softmax(-1)), pi, k)


Way: TypeAlias = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]


def _by_difference(moment: Callable[[Tensor, Tensor], Tensor]) -> Way:
    def way(z: Tensor, y: Tensor, k: Tensor) -> Tensor:
        pi = z.softmax(-1)
        return _complement(moment(pi, _direct(z, y)), pi, k)

    return way


def _tv(form: Callable[[Tensor, Tensor, Tensor], Tensor], *, moments: bool) -> Way:
    def way(z: Tensor, y: Tensor, k: Tensor) -> Tensor:
        pi = z.softmax(-1)
        g = (pi - y.softmax(-1)).sign() / 2
        return form(pi * g if moments else g, pi, k)

    return way


_WAYS: dict[str, dict[str, Way]] = {
    "kl": {
        "plain": _kl_plain,
        "complement": lambda z, y, k: _complement((pi := z.softmax(-1)) - y.softmax(-1), pi, k),
        "difference": _by_difference(lambda pi, direct: -pi * (-direct).expm1()),
        "moments": _kl_moments,
    },
    "reverse-kl": {
        "plain": _reverse_plain,
        "complement": _reverse_complement,
        "difference": _by_difference(lambda pi, direct: pi * direct),
    },
    "tv": {
        "plain": _tv(_plain, moments=False),
        "complement": _tv(_complement, moments=True),
        "difference": _by_difference(lambda pi, direct: pi * direct.sign() / 2),
    },
}
"""Every form of C in torch, `(logits, behavior_logits [T, V], k [T, 1]) -> [T]`, by divergence."""

TIMED = tuple(_WAYS)
