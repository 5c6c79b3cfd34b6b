"""Ways to compute C, operation by operation, as implementations write them.

Every form sees the cells of a view (the retained tokens, k included, and the tail as the last one;
in the full view all tokens).  With `a_j = pi_j` on a token's cell and `w = x / pi_T` on the
tail's, `l_j = log pi_j - log mu_j`, `eps = sum_{j != k} pi_j` and `q = sum_{j != k} pi_j a_j`:

==============  ===================================================================
form            C
==============  ===================================================================
``plain``       `pi_k (g_k - gbar) - sum pi_j a_j (g_j - gbar)`; for forward KL
                `(pi_k - mu_k) + sum a_j (mu_j - pi_j)`
``complement``  `h_k (eps^2 + q) - sum_{j != k} h_j (a_j + pi_k eps - q)`, h from masses
``difference``  the same, with `h` from `l`, and `l` from differences of logits
``moments``     forward KL, full view: from sums of one pass without k
==============  ===================================================================

Source: statements `coefficient.*`, `stable.complement-universal`, `stable.difference` and
`stable.moments-complement` of `docs/formulas.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pdverify.batch import InputError
from pdverify.precision.numbers import Rounded
from pdverify.registry import Registry

Bools: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Cells:
    """Both policies on `N` cells, as they were computed.

    Attributes:
        mu, pi: `[T, N]` masses.
        l: `[T, N]`, log pi - log mu, of log-probs.
        direct: `[T, N]`, the same from differences of logits (the tail's as `l`).
        a: `[T, N]`, `pi_j`, and `w` on the tail.
        is_k: `[T, N]` bool.
        used: `[T, N]` bool, cells that hold a token (or a tail).
        moments: sums of one pass over the vocabulary, for the form of that name.
    """

    mu: Rounded
    pi: Rounded
    l: Rounded  # noqa: E741
    direct: Rounded
    a: Rounded
    is_k: Bools
    used: Bools
    moments: Callable[[], Rounded] | None

    def at_k(self, x: Rounded) -> Rounded:
        """The sampled token's, `[T]`."""
        return x.at(self.is_k.argmax(axis=-1)[:, None])[:, 0]

    def others(self, x: Rounded) -> Rounded:
        """`x` with an exact 0 at k and at empty cells."""
        return x.where(~self.is_k & self.used)

    @cached_property
    def _around_k(self) -> tuple[Rounded, Rounded, Rounded]:
        """`eps^2 + q` and `pi_k eps - q`, `[T]`, and `pi a` of the others."""
        pi = self.others(self.pi)
        eps, squares = pi.sum(), pi * self.a
        q = squares.sum()
        return eps * eps + q, self.at_k(self.pi) * eps - q, squares

    def complement(self, h: Rounded) -> Rounded:
        """C from moments `h`, `[T, N]`."""
        first, base, _ = self._around_k
        terms = self.others(h * (self.a + base[:, None]))
        return self.at_k(h) * first - terms.sum()


@dataclass(frozen=True)
class Form:
    """One way to compute C.

    Attributes:
        summary: one line.
        divergences: names that it is known for.
        partitions: views that it is known for.
        coefficient: C `[T]` of a divergence from the cells.
    """

    summary: str
    divergences: tuple[str, ...]
    partitions: tuple[str, ...]
    coefficient: Callable[[str, Cells], Rounded]

    def check(self, divergence: str, partition: str) -> None:
        """Whether C of this divergence and view can be computed in this form.

        Raises:
            InputError: it cannot.
        """
        for what, name, known in (
            ("divergence", divergence, self.divergences),
            ("partition", partition, self.partitions),
        ):
            if name not in known:
                raise InputError(what, None, name, f"this form knows {', '.join(known)}")


def _plain(name: str, cells: Cells) -> Rounded:
    pi, mu, a = cells.pi, cells.mu, cells.a
    if name == "kl":
        difference = (mu - pi).where(cells.used)
        return (cells.at_k(pi) - cells.at_k(mu)) + (a * difference).sum()
    g = cells.l.where(cells.used) if name == "reverse-kl" else (pi - mu).sign().halved()
    mean = (pi * g).where(cells.used).sum()
    centered = g - mean[:, None]
    total = ((pi * a) * centered).where(cells.used).sum()
    return cells.at_k(pi) * cells.at_k(centered) - total


def _moment(name: str, cells: Cells) -> Rounded:
    """`h = pi f'(pi / mu)` from the masses."""
    if name == "kl":
        return cells.pi - cells.mu
    if name == "tv":
        return cells.pi * (cells.pi - cells.mu).sign().halved()
    return cells.pi * cells.l.where(cells.used)


def _direct_moment(name: str, cells: Cells) -> Rounded:
    """The same from the log-ratio alone."""
    direct = cells.direct.where(cells.used)
    if name == "kl":
        return -(cells.pi * (-direct).expm1())
    if name == "tv":
        return cells.pi * direct.sign().halved()
    return cells.pi * direct


def _moments(name: str, cells: Cells) -> Rounded:
    if cells.moments is None:
        raise InputError("partition", None, "topk", "one-pass moments are for the full view")
    return cells.moments()


FORMS: Registry[Form] = Registry("form")

_ALL = ("kl", "reverse-kl", "tv")
_BOTH = ("full", "topk")
FORMS.add("plain", Form("as the definition is written", _ALL, _BOTH, _plain))
FORMS.add(
    "complement",
    Form(
        "nothing is subtracted from 1, moments from the masses",
        _ALL,
        _BOTH,
        lambda name, cells: cells.complement(_moment(name, cells)),
    ),
)
FORMS.add(
    "difference",
    Form(
        "the complement form, moments from differences of logits",
        _ALL,
        _BOTH,
        lambda name, cells: cells.complement(_direct_moment(name, cells)),
    ),
)
FORMS.add(
    "moments",
    Form("sums of one pass, without k", ("kl",), ("full",), _moments),
)
