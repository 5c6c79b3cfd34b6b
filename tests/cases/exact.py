"""Right values of edge cases, evaluated with mpmath at 50 digits from the bits a batch stores.

A witness of its own: nothing here comes from the package's definitions or its oracle.
"""

from __future__ import annotations

from typing import Any

from mpmath import mp, mpf

from pdverify.batch import Batch, Rows
from pdverify.cases.edge import Right

DIGITS = 40


def evaluate(batch: Batch, right: Right) -> tuple[str, ...]:
    """The values of `right` as decimals of 40 digits."""
    rows = batch.rows()
    values: list[Any] = []
    with mp.workdps(50):
        for row in range(len(rows)):
            value = eval(right.expression, names(rows, row, right))
            values.extend(value if isinstance(value, list) else [value])
        return tuple(decimal(value) for value in values)


def decimal(value: Any) -> str:
    """40 significant digits; integers (exact zeros too) and infinity as such."""
    if isinstance(value, int):
        return str(value)
    if mp.isinf(value):
        return "inf"
    return str(int(value)) if mp.isint(value) else mp.nstr(mpf(value), DIGITS)


def names(rows: Rows, row: int, right: Right) -> dict[str, Any]:
    """What an expression may name; see `pdverify.cases.edge`."""
    k = int(rows.tokens[row])
    mu = None if rows.behavior_logits is None else softmax(rows.behavior_logits[row])
    pi = None if rows.logits is None else softmax(rows.logits[row])
    if right.partition == "full" and mu is not None:
        m_k = mu[k]
    else:
        m_k = mp.exp(mpf(float(rows.behavior_logprobs[row])))
    p_k = mp.exp(mpf(float(rows.logprobs[row]))) if pi is None else pi[k]
    scope: dict[str, Any] = {
        "mu": mu,
        "pi": pi,
        "k": k,
        "A": mpf(float(rows.advantages[row])),
        "V": rows.vocab_size,
        "m_k": m_k,
        "p_k": p_k,
        "log": mp.log,
        "sgn": mp.sign,
        "inf": mp.inf,
        "w": mpf(0),
        "m_T": mpf(0),
        "p_T": mpf(0),
    }
    if right.partition == "full" and mu is not None:
        scope["cells"] = scope["support"] = list(zip(mu, pi, strict=True))
    elif right.partition == "topk" and rows.topk_ids is not None:
        scope |= coarse(rows, row, right, pi, k, m_k)
    return scope


def softmax(logits: Any) -> list[Any]:
    mass = [mp.exp(mpf(float(z))) for z in logits]
    total = mp.fsum(mass)
    return [m / total for m in mass]


def coarse(rows: Rows, row: int, right: Right, pi: list[Any], k: int, m_k: Any) -> dict[str, Any]:
    listed = {
        int(i): mp.exp(mpf(float(y)))
        for i, y in zip(rows.topk_ids[row], rows.topk_logprobs[row], strict=True)
    }
    masses = {i: m for i, m in listed.items() if m > 0} | {k: m_k}
    outside = [i for i in range(rows.vocab_size) if i not in masses]
    support = [(m, pi[i]) for i, m in masses.items()]
    if not outside:
        return {"support": support, "cells": support}
    p_t = mp.fsum(pi[i] for i in outside)
    m_t = max(mpf(0), 1 - mp.fsum(masses.values()))
    x = {
        "aggregated": p_t**2,
        "uniform": p_t**2 / len(outside),
        "exact": mp.fsum(pi[i] ** 2 for i in outside),
        None: mp.nan,
    }[right.tail]
    return {
        "support": support,
        "cells": [*support, (m_t, p_t)],
        "m_T": m_t,
        "p_T": p_t,
        "w": x / p_t if p_t else mpf(0),
    }
