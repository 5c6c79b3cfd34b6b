"""How much rounding may cost: derived error bounds for D, C and the log-ratio.

A budget says how far an honest implementation in a format of unit roundoff `u` may land from the
true value for the very bits it was given.  Nothing here is fitted; the constants are

* `KAPPA = 4`: exp, log, expm1, log1p err by at most 4 u relative;
* `CHAIN = 84`: the longest chain of additions in a sum of up to 2^21 terms, for NumPy's pairwise
  sum (128-blocks in 8 lanes, then a tree) and torch's cascade (4 levels of 16, 4 unrolled, up to
  16 lanes); a sum of n terms errs by at most `u (min(n, CHAIN) + 2) sum |terms|`;
* `SLACK = 1.01`: second-order terms and the float64 rounding of the bound itself.

**Log-probs.**  With `dz = z - max z`, `L = log sum e^dz`, `E = sum pi |dz| + KAPPA (1 + L) + c`,
the computed `log pi_i` is off by at most `u lambda_i`, `lambda_i = |dz_i| + |dz_i - L| + E`, and
`pi_i` by the factor `1 +- rho_i`, `rho_i = expm1(u (lambda_i + KAPPA))`.  The bound is invariant
under a common shift of the logits.  Stored log-probs are exact inputs: there
`sigma = expm1(u KAPPA)`.  The tail mass `1 - sum_S mu` is known to an absolute `tau`.

**Any divergence.**  Moments `h = pi f'(pi / mu)` and cells are evaluated at the ends of the box in
which the computed masses lie: `f` is convex and `f'` monotone, so the ends bound the interior
(`docs/formulas.md`, rounding).  This is how the ties that total variation can flip are counted:
the sign at a tie ranges over [-1, 1].

**Forms.**  ``plain`` covers `C = h_k - w h_T - sum pi h - hbar (pi_k - n2)` and its rearrangements,
`1 - sum` included; ``complement`` covers the stable form over moments `h`
(`complement_coefficient`).  It is too tight for other stable forms, `sum (eps + pi) (mu - pi)` of
forward KL among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pdverify.batch import FloatArray, Rows
from pdverify.definitions.cells import (
    Cells,
    build,
    log_softmax,
    sampled_logprob,
    tail_mean,
    tail_square,
)
from pdverify.definitions.divergences import DIVERGENCES
from pdverify.rules import Partition, Support, Tail

Float64: TypeAlias = NDArray[np.float64]
Form: TypeAlias = Literal["plain", "complement"]

KAPPA = 4.0
CHAIN = 84
ANY_ORDER = 2**31
SLACK = 1.01


def chain(terms: int, longest: int = CHAIN) -> float:
    """Roundings on the longest path of a sum of `terms` numbers and of two operations after it."""
    return min(terms, longest) + 2.0


@dataclass(frozen=True, eq=False)
class _Errors:
    """Masses of the cells that are neither k nor the tail, and their relative errors, `[T, M]`."""

    mu: Float64
    pi: Float64
    rho: Float64
    sigma: Float64
    gap: Float64


class Budgets:
    """Error budgets of every row, for one partition, format and form.

    Args:
        rows: the tokens; `T` of them.
        partition, support: the cells the quantities are taken on.
        unit_roundoff: of the format the implementation computes in (2^-24 for fp32).
        form: ``plain`` or ``complement``, see the module.
        longest: bound of the longest chain of additions in a sum; `ANY_ORDER` admits sums in
            any order, one term after the other included (torch's CPU softmax is close to it).
        cells: `build(rows, partition, support)` where the caller holds it.
    """

    def __init__(
        self,
        rows: Rows,
        partition: Partition,
        support: Support,
        unit_roundoff: float,
        form: Form = "plain",
        cells: Cells | None = None,
        longest: int = CHAIN,
    ) -> None:
        self.rows, self.partition, self.form = rows, partition, form
        self.unit, self.longest = unit_roundoff, longest
        self.cells = build(rows, partition, support) if cells is None else cells

    def log_ratio(self) -> Float64:
        """Budget of `log pi_k - log mu_k`, `[T]` nats."""
        return np.asarray(self._gap_k * SLACK)

    def divergence(self, name: str, delta: float | Float64 = 0.0) -> Float64:
        """Budget of `D - delta`, `[T]`, the comparison included."""
        return self._divergence(name) + SLACK * (self.unit * delta + self._excess)

    def coefficient(self, name: str, tail: Tail | None = None) -> Float64:
        """Budget of `C`, `[T]`, with the tail's collision mass as `tail` estimates it."""
        with np.errstate(invalid="ignore", over="ignore"):
            bound = self._complement(name, tail) if self.form == "complement" else None
            bound = self._plain(name, tail) if bound is None else bound
        bound = bound + 2 * self._excess
        return np.asarray(np.where(np.isnan(bound), np.inf, bound * SLACK))

    @cached_property
    def _excess(self) -> Float64:
        """Retained behavior mass above 1, `[T]`, which storage rounding can leave.

        Forms that agree for `sum mu = 1` then part by up to `excess` (centered and classical
        cells of D) or `excess (pi_k + n2)` (C with the mean moment `-sum mu` taken as -1).  The
        complement form takes the classical cells of the masses as they are: no allowance.
        """
        if self.cells.ids is None or self.form == "complement":
            return np.zeros(len(self.rows))
        return np.asarray(np.maximum(self.cells.mu.sum(-1) - 1, 0.0))

    def curvature(self, tail: Tail | None = None) -> Float64:
        """Budget of the second derivative of forward KL along the step, `[T]`.

        Every term of `sum pi (pi + eps)^2 - (sum pi (pi + eps))^2 - mu_T Var_tail` is a product
        of at most four masses, each off by at most the row's largest relative error.
        """
        cells, u = self.cells, self.unit
        eps = self._rest
        worst = np.maximum(self._others.rho.max(axis=-1), np.maximum(self._rho_tail, self._rho_k))
        worst = np.maximum(worst, self._tail_errors[1])
        pi = self._others.pi
        w, w2 = tail_mean(cells, tail), tail_square(cells, tail)
        first = (pi * (pi + eps[:, None])).sum(-1) + cells.pi_tail * (w + eps)
        second = (pi * (pi + eps[:, None]) ** 2).sum(-1)
        second = second + cells.pi_tail * (w2 + 2 * eps * w + eps * eps)
        spread = (cells.mu_tail + self._tau) * (w2 + w * w)
        relative = 5 * worst + u * (4 * self._chain + 8)
        total = SLACK * (
            relative * (second + 2 * first * first + spread) + self._tau * (w2 + w * w)
        )
        return np.asarray(total)

    @cached_property
    def _chain(self) -> float:
        return chain(self.rows.vocab_size, self.longest)

    @cached_property
    def _log_training(self) -> tuple[Float64, Float64, Float64]:
        return self._log_error(self.rows.logits)

    def _log_error(self, logits: FloatArray | None) -> tuple[Float64, Float64, Float64]:
        """Relative error of each probability `[T, V]`, the probabilities, and `E` `[T, 1]`."""
        assert logits is not None
        z = logits.astype(np.float64)
        dz = np.abs(z - z.max(axis=-1, keepdims=True))
        log_p = log_softmax(z)
        p = np.exp(log_p)
        dz = np.where(np.isinf(dz), 0.0, dz)
        own = np.where(np.isinf(log_p), 0.0, np.abs(log_p))
        spread = (p * dz).sum(-1, keepdims=True)
        norm = -log_p.max(axis=-1, keepdims=True)
        error = spread + KAPPA * (1 + norm) + self._chain
        return np.expm1(self.unit * (dz + own + error + KAPPA)), p, error

    @cached_property
    def _training(self) -> tuple[Float64, Float64]:
        """`rho` and `pi` on the whole vocabulary, `[T, V]`."""
        if self.rows.logits is None:
            return np.empty((len(self.rows), 0)), np.empty((len(self.rows), 0))
        rho, p, _ = self._log_training
        return rho, p

    @cached_property
    def _at_k(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return np.arange(len(self.rows)), self.rows.tokens

    @cached_property
    def _rho_k(self) -> Float64:
        if self.rows.logits is None:
            return np.full(len(self.rows), np.expm1(self.unit * KAPPA))
        return self._training[0][self._at_k]

    @cached_property
    def _behavior(self) -> tuple[Float64, Float64] | None:
        """`sigma` and `mu` on the whole vocabulary in the full view, else None."""
        if self.partition != "full":
            return None
        sigma, p, _ = self._log_error(self.rows.behavior_logits)
        return sigma, p

    @cached_property
    def _sigma_k(self) -> Float64:
        if self._behavior is not None:
            return self._behavior[0][self._at_k]
        return np.full(len(self.rows), np.expm1(self.unit * KAPPA))

    @cached_property
    def _others(self) -> _Errors:
        cells = self.cells
        if self._behavior is not None:
            sigma, mu = self._behavior
            rho, pi = self._training
            mu, pi = mu.copy(), pi.copy()
            mu[self._at_k] = 0.0
            pi[self._at_k] = 0.0
        else:
            assert cells.ids is not None
            other = cells.ids != self.rows.tokens[:, None]
            mu, pi = np.where(other, cells.mu, 0.0), np.where(other, cells.pi, 0.0)
            if self.rows.logits is None:
                rho = np.zeros(mu.shape)
            else:
                rho = np.take_along_axis(self._training[0], cells.ids, axis=-1)
            sigma = np.full(mu.shape, np.expm1(self.unit * KAPPA))
        return _Errors(mu, pi, rho, sigma, self._gap_error(mu, pi, rho, sigma))

    def _gap_error(self, mu: Float64, pi: Float64, rho: Float64, sigma: Float64) -> Float64:
        """Error of `log pi - log mu`, nats."""
        with np.errstate(divide="ignore", invalid="ignore"):
            gap = np.abs(np.log(pi) - np.log(mu))
        gap = np.where(np.isfinite(gap), gap, 0.0)
        return np.asarray(np.log1p(rho) + np.log1p(sigma) + self.unit * (gap + 1))

    @cached_property
    def _gap_k(self) -> Float64:
        own = np.abs(self.cells.log_gap)
        own = np.where(np.isfinite(own), own, 0.0)
        total = np.log1p(self._rho_k) + np.log1p(self._sigma_k) + self.unit * (own + 1)
        if self.partition == "full":
            return np.asarray(total)
        return np.asarray(total + self.unit * np.abs(sampled_logprob(self.rows)))

    @cached_property
    def _rest(self) -> Float64:
        return np.asarray(self._others.pi.sum(-1) + self.cells.pi_tail)

    @cached_property
    def _tau(self) -> Float64:
        """Absolute error of the behavior tail mass, `[T]`."""
        cells = self.cells
        if cells.ids is None:
            return np.zeros(len(self.rows))
        terms = chain(cells.mu.shape[-1], self.longest)
        if self.form == "plain":
            plain = SLACK * self.unit * (KAPPA + terms + 2) * (cells.mu.sum(-1) + 1)
            return np.asarray(plain)
        top = cells.mu.max(-1)
        others = cells.mu.sum(-1) - top
        return np.asarray(
            SLACK * self.unit * ((KAPPA + terms + 2) * others + (KAPPA + 2) * (1 - top))
        )

    @cached_property
    def _tail_errors(self) -> tuple[Float64, Float64]:
        """Relative error of `pi_T` and of `w`, `[T]`."""
        cells, u = self.cells, self.unit
        if cells.ids is None or self.rows.logits is None:
            mass = SLACK * u * (KAPPA + 2) * np.ones(len(self.rows))
            if cells.ids is not None and self.form == "plain":
                # 1 - pi_k from a stored log-prob
                with np.errstate(divide="ignore", invalid="ignore"):
                    mass = mass + SLACK * u * (2 * KAPPA + 4) / cells.pi_tail
            return mass, mass
        rho, pi = self._training
        used = cells.mu > 0
        used |= cells.ids == self.rows.tokens[:, None]
        row = np.broadcast_to(np.arange(len(self.rows))[:, None], used.shape)
        tail = pi.copy()
        tail[row[used], cells.ids[used]] = 0.0
        weighted = (tail * rho).sum(-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            mass = weighted / cells.pi_tail + u * self._chain
            squares = 2 * (tail * tail * rho).sum(-1) / cells.collision + u * self._chain
            if self.form == "plain":
                kept = (cells.pi * np.where(used, 1.0, 0.0)).sum(-1)
                rho_kept = (cells.pi * np.take_along_axis(rho, cells.ids, axis=-1)).sum(-1)
                terms = chain(cells.pi.shape[-1], self.longest)
                lost = rho_kept + u * (KAPPA + terms + 2) * (kept + 1)
                mass = mass + lost / cells.pi_tail
        empty = cells.pi_tail <= 0
        mass = np.where(empty, 0.0, mass)
        return mass, np.where(empty, 0.0, np.nan_to_num(squares, nan=0.0) + mass)

    @property
    def _rho_tail(self) -> Float64:
        return self._tail_errors[0]

    @cached_property
    def _tail_gap(self) -> Float64:
        """Error of `log pi_T`, nats; infinite where a computed `pi_T` can be 0."""
        rho = self._rho_tail
        return np.where(rho < 1, -np.log1p(-np.where(rho < 1, rho, 0.0)), np.inf) + self.unit

    def _box(self, name: str) -> tuple[Float64, Float64, Float64, Float64, Float64, Float64]:
        """`h` and its error for the others `[T, M]`, k `[T]` and the tail `[T]`."""
        moment = DIVERGENCES[name].moment
        cells, others = self.cells, self._others
        h, dh = self._moment_box(moment, others.mu, others.pi, others.rho, others.sigma, others.gap)
        h_k, dh_k = self._moment_box(
            moment, cells.mu_k, cells.pi_k, self._rho_k, self._sigma_k, self._gap_k
        )
        h_t, dh_t = self._moment_box(
            moment,
            cells.mu_tail,
            cells.pi_tail,
            self._rho_tail,
            np.full(len(self.rows), 2 * self.unit),
            self._tail_gap,
            self._tau,
        )
        return h, dh, h_k, dh_k, h_t, dh_t

    def _moment_box(
        self,
        moment: object,
        mu: Float64,
        pi: Float64,
        rho: Float64,
        sigma: Float64,
        gap: Float64,
        tau: Float64 | float = 0.0,
    ) -> tuple[Float64, Float64]:
        """The moment and how far it can move.

        `pi f'(t)` with `t` in `[t e^-gap, t e^gap]` (reached by moving mu alone) and the factor
        `1 +- rho` in front; `tau` moves mu besides.
        """
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            center = np.asarray(moment(mu, pi))  # type: ignore[operator]
            up = np.asarray(moment((mu + tau) * np.exp(gap), pi))  # type: ignore[operator]
            down = np.asarray(moment(np.maximum(mu - tau, 0.0) * np.exp(-gap), pi))  # type: ignore[operator]
            moved = np.maximum(np.abs(up - center), np.abs(down - center))
            slope = rho + self.unit * (KAPPA + 4)
            error = (1 + rho) * moved + slope * np.abs(center) + pi * rho + mu * sigma
        used = (mu > 0) | (pi > 0)
        return center, np.where(used, np.where(np.isnan(error), np.inf, error), 0.0)

    def _divergence(self, name: str) -> Float64:
        cell = DIVERGENCES[name].cell
        cells, others = self.cells, self._others
        terms, errors = self._cell_box(
            cell, others.mu, others.pi, others.rho, others.sigma, others.gap
        )
        k_terms, k_errors = self._cell_box(
            cell, cells.mu_k, cells.pi_k, self._rho_k, self._sigma_k, self._gap_k
        )
        sigma_tail = np.full(len(self.rows), 2 * self.unit)
        t_terms, t_errors = self._cell_box(
            cell,
            cells.mu_tail,
            cells.pi_tail,
            self._rho_tail,
            sigma_tail,
            self._tail_gap,
            self._tau,
        )
        total = errors.sum(-1) + k_errors + t_errors
        size = terms.sum(-1) + k_terms + t_terms
        bound = SLACK * (total + self.unit * (self._chain + KAPPA) * size)
        return np.where(np.isnan(bound), np.inf, bound)

    def _cell_box(
        self,
        cell: object,
        mu: Float64,
        pi: Float64,
        rho: Float64,
        sigma: Float64,
        gap: Float64,
        tau: Float64 | float = 0.0,
    ) -> tuple[Float64, Float64]:
        """Size of a cell's term (classical or centered) and how far it can move."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            center = np.asarray(cell(mu, pi))  # type: ignore[operator]
            moved = np.zeros(center.shape)
            for shift in (-1.0, 1.0):
                for step in (-1.0, 1.0):
                    box_mu = np.maximum(mu + shift * tau, 0.0)
                    corner = cell(box_mu, pi * np.exp(step * gap))  # type: ignore[operator]
                    moved = np.maximum(moved, np.abs(corner - center))
                if np.ndim(tau) == 0:
                    break
            error = moved * (1 + sigma) + sigma * np.abs(center) + pi * rho + mu * sigma + tau
        used = (mu > 0) | (pi > 0) | (np.asarray(tau) > 0)
        error = np.where(used, np.where(np.isnan(error), np.inf, error), 0.0)
        size = np.where(used, np.abs(center) + np.abs(pi - mu), 0.0)
        return np.where(np.isnan(size), np.inf, size), error

    def _masses(self, tail: Tail | None) -> tuple[Float64, Float64, Float64, Float64, Float64]:
        """`eps`, its error, `q = sum_{j != k} pi^2`, its error, and the error of `w`, `[T]`."""
        cells, others, u = self.cells, self._others, self.unit
        rho_tail, rho_mean = self._tail_errors
        w = tail_mean(cells, tail)
        d_w = w * (rho_mean if tail in (None, "exact") else rho_tail + 2 * u)
        eps = self._rest
        d_eps = (others.pi * others.rho).sum(-1) + cells.pi_tail * rho_tail + u * self._chain * eps
        tail_square = cells.pi_tail * w
        q = (others.pi**2).sum(-1) + tail_square
        d_q = (
            (others.pi**2 * (2 * others.rho + others.rho**2)).sum(-1)
            + cells.pi_tail * (d_w + w * rho_tail + d_w * rho_tail)
            + u * self._chain * q
        )
        return eps, d_eps, q, d_q, d_w

    def _complement(self, name: str, tail: Tail | None) -> Float64:
        cells, others, u = self.cells, self._others, self.unit
        h, dh, h_k, dh_k, h_t, dh_t = self._box(name)
        eps, d_eps, q, d_q, d_w = self._masses(tail)
        w = tail_mean(cells, tail)
        shift = cells.pi_k * eps - q
        d_shift = (
            cells.pi_k * (eps * self._rho_k + d_eps * (1 + self._rho_k))
            + d_q
            + 3 * u * (cells.pi_k * eps + q)
        )
        lead = eps**2 + q
        d_lead = 2 * eps * d_eps + d_eps**2 + d_q + 2 * u * lead
        weight = np.abs(others.pi + shift[:, None])
        d_weight = others.pi * others.rho + d_shift[:, None]
        weight_t, d_weight_t = np.abs(w + shift), d_w + d_shift
        size = np.abs(h)
        bound = dh_k * (lead + d_lead) + np.abs(h_k) * d_lead
        bound = bound + _dot(dh, weight + d_weight) + _dot(size, d_weight)
        bound = bound + _product(dh_t, weight_t + d_weight_t) + _product(np.abs(h_t), d_weight_t)
        total = np.abs(h_k) * lead + _dot(size, weight) + _product(np.abs(h_t), weight_t)
        return np.asarray(bound + u * (self._chain + 1) * total)

    def _plain(self, name: str, tail: Tail | None) -> Float64:
        cells, others, u = self.cells, self._others, self.unit
        h, dh, h_k, dh_k, h_t, dh_t = self._box(name)
        _, _, q, d_q, d_w = self._masses(tail)
        w = tail_mean(cells, tail)
        size, size_k, size_t = np.abs(h) + others.pi, np.abs(h_k) + cells.pi_k, np.abs(h_t)
        size_t = size_t + cells.pi_tail
        mean = np.abs(h.sum(-1) + h_k + h_t) + 1
        d_mean = dh.sum(-1) + dh_k + dh_t
        d_mean = d_mean + u * self._chain * (size.sum(-1) + size_k + size_t)
        pi_k, rho_k = cells.pi_k, self._rho_k
        n2 = q + pi_k**2
        d_n2 = d_q + pi_k**2 * (2 * rho_k + rho_k**2) + u * self._chain * n2
        bound = (1 + pi_k * (1 + rho_k)) * dh_k + pi_k * rho_k * size_k
        bound = bound + _dot(dh, others.pi * (1 + others.rho))
        bound = bound + _dot(size, others.pi * others.rho)
        bound = bound + _product(dh_t, w + d_w) + _product(size_t, d_w)
        bound = bound + d_mean * (pi_k * (1 + rho_k) + n2 + d_n2) + mean * (pi_k * rho_k + d_n2)
        total = size_k * (1 + pi_k) + _dot(size, others.pi) + _product(size_t, w)
        total = total + mean * (pi_k + n2)
        return np.asarray(bound + u * (self._chain + 4) * total)


def _product(x: Float64, y: Float64) -> Float64:
    """`x y` with `inf * 0 = 0`: an unused cell costs nothing, however large its slope."""
    return np.where(y > 0, x * np.where(y > 0, y, 1.0), 0.0)


def _dot(x: Float64, y: Float64) -> Float64:
    return np.asarray(_product(x, y).sum(axis=-1))
