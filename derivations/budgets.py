"""The budgets the judge uses (`pdverify.budgets`) against what float32 NumPy does.

The implementations here are meant to be the ones a reader would write: NumPy's own sums, the plain
form with `1 - sum` for the tail masses, and the complement form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from derivations.rows import Family, Float32, Float64, TopK, at, without
from pdverify.batch import Rows
from pdverify.budgets import Budgets, Form
from pdverify.oracle.float_balls import FloatBall

UNIT = 2.0**-24
FORMS: tuple[Form, ...] = ("plain", "complement")


@dataclass(frozen=True)
class Compared:
    """Float32 values `[T]`, the balls around the true ones, and what is allowed."""

    name: str
    value: Float32 | Float64
    truth: FloatBall
    budget: Float64


def judged(rows: Family, view: TopK | None) -> Rows:
    """The rows as the judge gets them: in the full view, or with stored top-K log-probs."""
    count, size = rows.z.shape
    listed = None if view is None else view.y[:, :-1]
    return Rows(
        index=np.zeros((count, 2), dtype=np.int64),
        tokens=rows.k,
        advantages=np.zeros(count),
        vocab_size=size,
        logits=rows.z,
        behavior_logits=rows.y if view is None else None,
        logprobs=None,
        behavior_logprobs=None if view is None else at(view.y, view.own),
        topk_ids=None if view is None else view.ids[:, :-1],
        topk_logprobs=listed,
        dtype="fp32",
        logprob_dtype="fp32",
    )


Both = dict[Form, Budgets]


def budgets(rows: Family, view: TopK) -> tuple[Both, Both]:
    """The budgets of both forms, in the full and in the top-K view.

    What does not depend on the form or the view is taken over from the first: four times the
    softmaxes of the same rows would cost more than all the rest.
    """
    given = judged(rows, None)
    first = Budgets(given, "full", "append", UNIT, "plain")
    first._others  # noqa: B018  (fills the caches)
    common = ("_log_training", "_training", "_behavior", "_others")
    second = Budgets(given, "full", "append", UNIT, "complement", first.cells)
    vars(second).update({name: vars(first)[name] for name in common})
    given = judged(rows, view)
    third = Budgets(given, "topk", "append", UNIT, "plain")
    fourth = Budgets(given, "topk", "append", UNIT, "complement", third.cells)
    for coarse in (third, fourth):
        vars(coarse).update({name: vars(first)[name] for name in common[:2]})
    return {"plain": first, "complement": second}, {"plain": third, "complement": fourth}


def softmax_terms(logits: Float32) -> tuple[Float32, Float32]:
    """log-softmax and softmax in float32 NumPy."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return log, np.exp(log)


def plain(h: Float32, pi: Float32, k: NDArray[np.int64]) -> Float32:
    """h_k - sum pi h - hbar (pi_k - n2) in float32."""
    n2 = (pi * pi).sum(axis=-1)
    total: Float32 = at(h, k) - (pi * h).sum(axis=-1) - h.sum(axis=-1) * (at(pi, k) - n2)
    return total


def complement(
    h: Float32,
    pi: Float32,
    k: NDArray[np.int64],
    h_tail: Float32 | float = 0.0,
    pi_tail: Float32 | float = 0.0,
    w: Float32 | float = 0.0,
) -> Float32:
    """h_k (eps^2 + q) - sum_{not k} h (pi + pi_k eps - q) - h_T (w + pi_k eps - q) in float32."""
    h_k, pi_k, h, pi = at(h, k), at(pi, k), without(h, k), without(pi, k)
    eps, q = pi.sum(axis=-1) + pi_tail, (pi * pi).sum(axis=-1) + pi_tail * w
    shift = pi_k * eps - q
    others = (h * (pi + shift[:, None])).sum(axis=-1)
    total: Float32 = h_k * (eps * eps + q) - others - h_tail * (w + shift)
    return total


def enclosed_complement_form(h: FloatBall, pi: FloatBall, k: NDArray[np.int64]) -> FloatBall:
    """Balls around the same."""
    place = (np.arange(len(k)), k)
    h_k, pi_k = h[place], pi[place]
    h, pi = h.put(place, 0.0), pi.put(place, 0.0)
    eps, q = pi.sum(), pi.square().sum()
    shift = pi_k * eps - q
    weight = pi + FloatBall(shift.mid[:, None], shift.rad[:, None])
    return h_k * (eps.square() + q) - (h * weight).sum()


def compared_full(
    rows: Family,
    both: Both,
    c: FloatBall,
    d: FloatBall,
    log_pi: FloatBall,
    log_mu: FloatBall,
    others: bool,
) -> Iterator[Compared]:
    """Forward KL in the full view; with `others` reverse KL and total variation too."""
    (log_p, p), (log_m, m) = softmax_terms(rows.z), softmax_terms(rows.y)
    k, place = rows.k, (np.arange(len(rows.k)), rows.k)
    gap = log_p - log_m
    ratio = log_pi[place] - log_mu[place]
    yield Compared("log-ratio", gap[place], ratio, both["plain"].log_ratio())
    local = at(p, k) - at(m, k)
    budget = both["plain"].coefficient("kl")
    yield Compared("kl plain C", local + (p * (m - p)).sum(axis=-1), c, budget)
    two_sums = local + ((p * m).sum(axis=-1) - (p * p).sum(axis=-1))
    yield Compared("kl plain C", two_sums, c, budget)
    yield Compared("kl plain C", plain(p - m, p, k), c, budget)
    budget = both["complement"].coefficient("kl")
    yield Compared("kl complement C", complement(p - m, p, k), c, budget)
    budget = both["plain"].divergence("kl")
    yield Compared("kl D", -(m * gap).sum(axis=-1), d, budget)
    yield Compared("kl D", (m * np.log(m / p)).sum(axis=-1), d, budget)
    if not others:
        return
    pi, mu = log_pi.exp(), log_mu.exp()
    difference, ball = pi - mu, pi * (log_pi - log_mu)
    moments = {
        "reverse-kl": (p * gap, ball, p * gap, ball),
        "tv": (
            p * np.sign(p - m) / 2,
            pi * difference.sign() * 0.5,
            np.abs(p - m) / 2,
            difference.abs() * 0.5,
        ),
    }
    for name, (h, enclosed, cell, enclosed_cell) in moments.items():
        truth = enclosed_complement_form(enclosed, pi, k)
        budget = both["plain"].coefficient(name)
        yield Compared(f"{name} plain C", plain(h, p, k), truth, budget)
        budget = both["complement"].coefficient(name)
        yield Compared(f"{name} complement C", complement(h, p, k), truth, budget)
        budget = both["plain"].divergence(name)
        yield Compared(f"{name} D", cell.sum(axis=-1), enclosed_cell.sum(), budget)


def compared_top_k(
    rows: Family,
    view: TopK,
    both: Both,
    log_pi: FloatBall,
    truth: dict[str, FloatBall],
    resolved: NDArray[np.bool_],
) -> Iterator[Compared]:
    """Forward KL in the top-K view, exact tail.

    Tails by `1 - sum`, by `1 - sum` for mu alone, and as the backends take them.  `resolved`: the
    rows where `1 - sum` has any digit of pi_T; elsewhere its D is not compared.
    """
    log_all, p_all = softmax_terms(rows.z)
    y, place = at(view.y, view.own), (np.arange(len(rows.k)), rows.k)
    gap = log_pi[place] - FloatBall.exact(y)
    yield Compared("top-k log-ratio", log_all[place] - y, gap, both["plain"].log_ratio())
    log_p = np.take_along_axis(log_all, view.ids, axis=-1)
    p, m = (np.where(view.used, np.exp(x), np.float32(0)) for x in (log_p, view.y))
    p_all = p_all.copy()
    np.put_along_axis(p_all, view.ids, 0, axis=-1)
    collision, summed = (p_all * p_all).sum(axis=-1), p_all.sum(axis=-1)
    one, zero = np.float32(1), np.float32(0)
    filled = np.where(view.used, view.y, np.float32(-np.inf))
    top = filled.argmax(axis=-1)
    stable = np.maximum(-np.expm1(at(filled, top)) - without(m, top).sum(axis=-1), zero)
    from_sum = np.maximum(one - m.sum(axis=-1), zero)
    lost = np.maximum(one - p.sum(axis=-1), zero)
    allowed = {
        form: (both[form].coefficient("kl", "exact"), both[form].divergence("kl")) for form in FORMS
    }
    retained = (m * np.where(view.used, view.y - log_p, zero)).sum(axis=-1)
    cases: tuple[tuple[Form, Float32, Float32, NDArray[np.bool_]], ...] = (
        ("plain", from_sum, lost, resolved),
        ("plain", from_sum, summed, np.ones_like(resolved)),
        ("complement", stable, summed, np.ones_like(resolved)),
    )
    for form, m_tail, p_tail, compared in cases:
        w = np.where(p_tail > 0, collision / np.where(p_tail > 0, p_tail, one), zero)
        h_tail = p_tail - m_tail
        if form == "plain":
            c = at(p, view.own) - at(m, view.own)
            c = c + (p * (m - p)).sum(axis=-1) - w * h_tail
        else:
            c = complement(p - m, p, view.own, h_tail, p_tail, w)
        budget, d_budget = allowed[form]
        yield Compared(f"top-k kl {form} C", c, truth["plain"], budget)
        kept = (m_tail > 0) & compared
        quotient = np.where(kept, m_tail, one) / np.where(kept, p_tail, one)
        d = retained + np.where(kept, m_tail, zero) * np.log(quotient)
        ball = truth["divergence"]
        ball = FloatBall(np.where(compared, ball.mid, d), np.where(compared, ball.rad, 0.0))
        yield Compared(f"top-k kl {form} D", d, ball, d_budget)
