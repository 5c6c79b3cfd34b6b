"""Tokens designed so that `|C| / beta` covers many octaves while D stays large.

`C` is the coefficient whose sign is the direction criterion, `beta` its rounding budget per unit
roundoff: arithmetic at unit roundoff `u` can tell the sign of `C` where `|C| / beta` exceeds `u`
(times a constant).  The family `graded` reaches small `C` by making the policies near-equal, and
then D is tiny too, so a mask keeps the token whatever C is.  Here the two policies are far apart
(the proximity criterion is met at any usual threshold) and `C` is brought close to zero by
cancellation: then a wrong sign shows in the keep/drop decision itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from pdverify.batch import Batch, IntArray
from pdverify.cases.assemble import Array, Rng, Size, assemble
from pdverify.formats import FORMATS

RowValues: TypeAlias = Callable[[Batch], Array]
"""A function of a batch with one float64 value per valid token, in the order of `Batch.rows`."""

SETTLED_BITS = 44
"""Bits of C that a design settles; float64 evaluates C to about 2^-50 of its terms."""

SCAN = np.linspace(-6.0, 6.0, 25)
"""Training logits of the sampled token at which a change of sign is looked for."""

PROBE = 2.0**-6
"""Step of the first difference quotient in a tuned logit (nats); secants refine it."""

SECANTS = 6
"""Secant steps for each tuned logit."""

STRONG = 8
"""Tokens on which the two policies disagree by 1 to 3 nats."""


def designed_rows(
    rng: Rng,
    coefficient: RowValues,
    beta: RowValues,
    *,
    sequences: int,
    length: int,
    vocab_size: int,
    top_k: int,
    dtype: str = "fp32",
    octaves: tuple[float, float] = (4.0, 40.0),
) -> Batch:
    """A batch whose `|C| / beta` is log-uniform from `2^-octaves[1]` to `2^-octaves[0]`.

    The training logit of the sampled token is bisected to where C takes the wanted value, then
    tokens whose behavior logit is 0 are perturbed one after the other: around 0 even a narrow
    format holds tiny numbers, so each of them adds the bits of one significand.  C has either
    sign with probability 1/2; advantages are +1 or -1; nothing is padded.

    Where C does not take the wanted value (total variation jumps over zero at a kink; 2^-4 is
    out of reach on some rows), the nearest value of the scan is kept: read the margin that was
    reached from `coefficient` and `beta`, not from the request.  fp16 ends near 2^-24.

    Args:
        rng: source of everything random here.
        coefficient: `Batch -> [T]` float64, C of each valid token.
        beta: `Batch -> [T]` float64 > 0, the budget of C per unit roundoff.
        sequences, length, vocab_size, top_k, dtype: as in `Family.__call__`.
        octaves: the range of `-log2(|C| / beta)`.

    Raises:
        ValueError: if the vocabulary is too small for the design in this format.
    """
    size = Size(sequences, length, vocab_size, top_k, dtype)
    form = FORMATS[dtype]
    levels = max(1, math.ceil(SETTLED_BITS / form.significand_bits) - 1)
    if vocab_size < levels + 1 + STRONG:
        raise ValueError(f"vocab_size = {vocab_size}: at least {levels + 1 + STRONG} in {dtype}")
    batch, roles = _start(rng, size, levels)
    assert batch.logits is not None
    total, rows = size.index.size, np.arange(size.index.size)
    spread = (rng.permutation(total) + rng.random(total)) / total
    margin = np.exp2(-(octaves[0] + (octaves[1] - octaves[0]) * spread))
    wanted = margin * np.where(rng.random(total) < 0.5, -1.0, 1.0)
    kind = batch.logits.dtype
    logits = batch.logits.reshape(total, vocab_size).astype(np.float64)

    def moved() -> Batch:
        return replace(batch, logits=logits.astype(kind).reshape(*size.shape, vocab_size))

    def miss(column: int, value: Array) -> Array:
        logits[rows, roles[:, column]] = value
        return coefficient(moved()) - wanted * beta(moved())

    scan = np.stack([miss(levels, np.full(total, x)) for x in SCAN])
    crosses = (scan[:-1] < 0) != (scan[1:] < 0)
    first = np.argmax(crosses, axis=0)
    nearest = np.argmin(np.abs(scan), axis=0)
    found = crosses.any(axis=0)
    low, high = SCAN[np.where(found, first, nearest)], SCAN[np.where(found, first + 1, nearest)]
    rising = scan[first, rows] < 0
    for _ in range(form.significand_bits + 4):
        middle = form.round((low + high) / 2)
        above = (miss(levels, middle) >= 0) == rising
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    miss(levels, low)
    for level in range(levels):
        best, least = np.zeros(total), miss(level, np.zeros(total))
        probe = np.full(total, PROBE)
        slope = (miss(level, probe) - least) / probe
        for _ in range(SECANTS):
            with np.errstate(divide="ignore", invalid="ignore"):
                value = best - least / slope
            value = form.round(np.clip(np.where(found & np.isfinite(value), value, best), -1, 1))
            rest = miss(level, value)
            change = value != best
            slope[change] = (rest - least)[change] / (value - best)[change]
            closer = np.abs(rest) < np.abs(least)
            best, least = np.where(closer, value, best), np.where(closer, rest, least)
        miss(level, best)
    return moved()


def _start(rng: Rng, size: Size, levels: int) -> tuple[Batch, IntArray]:
    """Two policies far apart, and the ids `[T, levels + 1]` of the tuned tokens of each row.

    In each row `levels` tokens have logit 0 on both sides, one is the sampled token, `STRONG`
    ones carry the disagreement and the others are a bulk of about the same total mass.
    """
    place = np.arange(size.vocab_size)
    shape = (*size.shape, size.vocab_size)
    tuned, strong = place < levels, (place > levels) & (place <= levels + STRONG)
    bulk = rng.normal(size=shape) - np.log(size.vocab_size)
    center = rng.uniform(-1.0, 1.0, size=shape)
    apart = rng.uniform(0.5, 1.5, size=shape) * np.where(place % 2 == 0, 1.0, -1.0)
    apart *= np.where(rng.random((*size.shape, 1)) < 0.5, 1.0, -1.0)
    base = np.where(strong, center, bulk)
    z = np.where(tuned | (place == levels), 0.0, np.where(strong, base + apart, base))
    y = np.where(
        tuned, 0.0, np.where(place == levels, center, np.where(strong, base - apart, base))
    )
    order = np.argsort(rng.random(shape), axis=-1)
    z, y = (np.take_along_axis(x, order, axis=-1) for x in (z, y))
    roles = np.argsort(order, axis=-1)[..., : levels + 1]
    batch = assemble(
        rng, size, z, y, sampler=lambda *_: roles[..., levels], mask=np.ones(size.shape, dtype=bool)
    )
    sign = np.where(rng.random(size.shape) < 0.5, -1.0, 1.0).astype(np.float32)
    return replace(batch, advantages=sign), roles.reshape(-1, levels + 1)
