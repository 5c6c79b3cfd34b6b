"""From sums over the vocabulary to D, C and the curvature.

Everything is `[T]`; the sampled token k stays apart from the sums over the others, so that

    C = h_k (eps^2 + q) - sum_{j != k} h_j pi_j - (pi_k eps - q) sum_{j != k} h_j,
    h_j = pi_j dD/dpi_j,   eps = sum_{j != k} pi_j,   q = sum_{j != k} pi_j^2,

the complement form of `docs/formulas.md`, keeps its digits when `pi_k` is near 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdverify.backends.cell_functions import CENTERING, cell_functions, log_ratio
from pdverify.backends.moments import FullMoments, TailMoments, times
from pdverify.rules import Tail


@dataclass(frozen=True)
class Sums:
    """One divergence on the cells of a partition.

    `mu_k`, `pi_k`, `gap_k` (`log pi_k - log mu_k`, nats) belong to the sampled token.  The sums run
    over the others: `rest` of pi, `collision` of pi^2, `cubes` of pi^3, `cells` of the shares of D,
    all with the tail cell; `moments` of h and `weighted` of `h pi` without it.  The tail's own h,
    `h_tail`, may be infinite, and `tail_mean` is its `sum_tail pi^2 / pi_T`.  `tail_variance` is
    `mu_T Var_tail(pi)`; `excess` is `sum mu - sum pi`: stored log-probs may sum to a little more
    than 1.
    """

    mu_k: Tensor
    pi_k: Tensor
    gap_k: Tensor
    rest: Tensor
    collision: Tensor
    cubes: Tensor
    cells: Tensor
    moments: Tensor
    weighted: Tensor
    h_tail: Tensor | None = None
    tail_mean: Tensor | float = 0.0
    tail_variance: Tensor | float = 0.0
    excess: Tensor | float = 0.0

    def divergence(self, name: str) -> Tensor:
        """`D`, in the unit of the divergence."""
        cell, _ = cell_functions(name)
        total = self.cells + cell(self.mu_k, self.pi_k, self.gap_k)
        return (total + CENTERING.get(name, 0.0) * self.excess).clamp_min(0.0)

    def coefficient(self, name: str) -> Tensor:
        """`C`."""
        _, moment = cell_functions(name)
        h_k = moment(self.mu_k, self.pi_k, self.gap_k)
        local = h_k * (self.rest * self.rest + self.collision)
        shift = self.pi_k * self.rest - self.collision
        others = self.weighted + shift * self.moments
        if self.h_tail is not None:
            others = others + times(self.tail_mean + shift, self.h_tail)
        return local - others

    def kl_curvature(self) -> Tensor:
        """Second derivative of forward KL along the frozen direction `u_i = 1[i = k] - pi_i`.

        `Var_pi(u) - mu_T Var_tail(u)`, with u shifted by `eps` so that k's value is exactly 0.
        """
        eps, q = self.rest, self.collision
        mean = q + eps * eps
        square = self.cubes + 2 * eps * q + eps**3
        return square - mean * mean - self.tail_variance


@dataclass(frozen=True)
class _Policy:
    """A policy of the full view: `log pi_i = (z_i - top) + scale` for the others.

    `norm` is its log-normalizer as in `Engine`, `log_k` the log-prob of k.
    """

    norm: Tensor
    log_k: Tensor
    scale: Tensor


def _policy(z_k: Tensor, top: Tensor, s1: Tensor) -> _Policy:
    # relative to the row's largest logit: a common offset costs no digits
    alone = s1 == 0
    anchor = torch.where(alone, z_k, torch.maximum(z_k, top))
    top, z_k = torch.where(alone, 0.0, top - anchor), z_k - anchor
    rest = torch.logaddexp(z_k, top + s1.log())
    scale = torch.where(alone, 0.0, top - rest)
    return _Policy(torch.stack([anchor, rest], -1), z_k - rest, scale)


class FullView:
    """Both policies over the whole vocabulary.

    Args:
        m: moments of the vocabulary without k.
        z_k, y_k: logits of k under both policies.
    """

    def __init__(self, m: FullMoments, z_k: Tensor, y_k: Tensor) -> None:
        self._m = m
        self._pi = _policy(z_k, m.top_z, m.s1)
        self._mu = _policy(y_k, m.top_y, m.m1)

    @property
    def norm(self) -> Tensor:
        """Log-normalizer of the training policy, as in `Engine`."""
        return self._pi.norm

    @property
    def behavior_norm(self) -> Tensor:
        """Log-normalizer of the behavior policy."""
        return self._mu.norm

    @property
    def log_pi_k(self) -> Tensor:
        """Training log-prob of k."""
        return self._pi.log_k

    @property
    def log_mu_k(self) -> Tensor:
        """Behavior log-prob of k."""
        return self._mu.log_k

    def sums(self, name: str, cells: tuple[Tensor, Tensor, Tensor] | None) -> Sums:
        """Sums of the divergence `name`.

        `cells` are its sums over `i != k` of cells, h, and `h pi`; forward and reverse KL follow
        from the moments and need none.
        """
        m, pi, mu = self._m, self._pi, self._mu
        pz, py = pi.scale.exp(), mu.scale.exp()
        eps, q, behavior = pz * m.s1, pz**2 * m.s2, py * m.m1
        shift = pi.scale - mu.scale  # log pi_i - log mu_i = d_i + shift
        if cells is None and name == "kl":
            d = py * (m.f + shift * m.m1)
            cells = eps - behavior - d, eps - behavior, q - pz * py * m.x
        elif cells is None:
            h = pz * (m.e1 + shift * m.s1)
            cells = h - eps + behavior, h, pz**2 * (m.e2 + shift * m.s2)
        return Sums(
            mu.log_k.exp(),
            pi.log_k.exp(),
            log_ratio(pi.log_k, mu.log_k),
            eps,
            q,
            pz**3 * m.s3,
            *cells,
        )


@dataclass(frozen=True)
class Retained:
    """The behavior policy's retained support: `ids`, `log_mu` `[T, K]`, the sampled `log_mu_k`.

    `kept` marks the slots that count: not k itself, and of positive probability.
    """

    ids: Tensor
    log_mu: Tensor
    log_mu_k: Tensor
    kept: Tensor

    @staticmethod
    def of(tokens: Tensor, ids: Tensor, log_mu: Tensor, log_mu_k: Tensor) -> Retained:
        """From a top-K list (nats, float64)."""
        kept = (ids != tokens[:, None]) & ~torch.isneginf(log_mu)
        return Retained(ids, log_mu.masked_fill(~kept, float("-inf")), log_mu_k, kept)

    def excluded(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Ids outside the tail, `[T, K + 1]`, and which of these slots count."""
        k = tokens[:, None]
        return torch.cat([self.ids, k], -1), torch.cat([self.kept, torch.ones_like(k).bool()], -1)

    def remainder(self) -> Tensor:
        """`1 - sum mu` over the support, the largest mass through expm1."""
        log_mu = torch.cat([self.log_mu, self.log_mu_k[:, None]], -1)
        top, where = log_mu.max(-1, keepdim=True)
        others = log_mu.exp().scatter(-1, where, 0.0).sum(-1)
        return -torch.expm1(top[:, 0]) - others


@dataclass(frozen=True)
class Cells:
    """Both policies on the cells {k}, the other retained tokens, and the tail.

    `mu`, `pi`, `gap` are `[T, K]`, unused slots (and k's) filled with 0; `gap` is
    `log pi - log mu`.  `tail_mean` is `sum_tail pi^2 / pi_T`, `tail_square` is
    `sum_tail pi^3 / pi_T`, as the tail estimator has them; `excess` as in `Sums`.
    """

    mu: Tensor
    pi: Tensor
    gap: Tensor
    mu_k: Tensor
    pi_k: Tensor
    gap_k: Tensor
    mu_tail: Tensor
    pi_tail: Tensor
    gap_tail: Tensor
    tail_mean: Tensor
    tail_square: Tensor
    excess: Tensor

    def sums(self, name: str) -> Sums:
        """Sums of the divergence `name`."""
        cell, moment = cell_functions(name)
        mu_tail, pi_tail, mean, square = (
            self.mu_tail,
            self.pi_tail,
            self.tail_mean,
            self.tail_square,
        )
        h = moment(self.mu, self.pi, self.gap)
        h_tail = moment(mu_tail, pi_tail, self.gap_tail)
        return Sums(
            self.mu_k,
            self.pi_k,
            self.gap_k,
            rest=self.pi.sum(-1) + pi_tail,
            collision=(self.pi**2).sum(-1) + pi_tail * mean,
            cubes=(self.pi**3).sum(-1) + pi_tail * square,
            cells=cell(self.mu, self.pi, self.gap).sum(-1) + cell(mu_tail, pi_tail, self.gap_tail),
            moments=h.sum(-1),
            weighted=times(self.pi, h).sum(-1),
            h_tail=h_tail,
            tail_mean=mean,
            tail_variance=mu_tail * (square - mean * mean),
            excess=self.excess,
        )


class CoarseView:
    """Both policies on the cells {k}, the other retained tokens, and the tail.

    Args:
        support: the behavior policy's.
        m: moments of the training policy's tail.
        z, z_k: training logits at `support.ids` `[T, K]` and at k.
        size: vocabulary size `V`.
    """

    def __init__(
        self, support: Retained, m: TailMoments, z: Tensor, z_k: Tensor, size: int
    ) -> None:
        self._support, self._m, self._size = support, m, size
        z = torch.cat([z.masked_fill(~support.kept, float("-inf")), z_k[:, None]], -1)
        top = torch.where(m.s1 == 0, float("-inf"), m.top)
        # relative to the row's largest logit: a common offset costs no digits
        anchor = torch.maximum(z.amax(-1), top)
        z, top = z - anchor[:, None], top - anchor
        tail = torch.where(m.s1 == 0, float("-inf"), top + m.s1.log())
        rest = torch.cat([z, tail[:, None]], -1).logsumexp(-1)
        self._log_pi, self.log_pi_k = z[:, :-1] - rest[:, None], z[:, -1] - rest
        self._log_pi_tail, self._scale = tail - rest, (top - rest).exp()
        self.norm = torch.stack([anchor, rest], -1)

    def cells(self, tail: Tail | None) -> Cells:
        """The cells; `tail` estimates the tail's collision mass, None is ``exact``."""
        support, m, pi_tail = self._support, self._m, self._log_pi_tail.exp()
        count = self._size - 1 - support.kept.sum(-1)
        if tail == "aggregated":
            mean, square = pi_tail, pi_tail * pi_tail
        elif tail == "uniform":
            mean = pi_tail / count.clamp_min(1)
            square = mean * mean
        else:
            total = torch.where(m.s1 == 0, 1.0, m.s1)
            mean = m.s2 / total * self._scale
            square = m.s3 / total * self._scale * self._scale
        remainder = support.remainder()
        mu_tail = torch.where(count > 0, remainder.clamp_min(0.0), 0.0)
        return Cells(
            support.log_mu.exp(),
            self._log_pi.exp(),
            torch.where(support.kept, self._log_pi - support.log_mu, 0.0),
            support.log_mu_k.exp(),
            self.log_pi_k.exp(),
            self.log_pi_k - support.log_mu_k,
            mu_tail,
            pi_tail,
            log_ratio(self._log_pi_tail, mu_tail.log()),
            mean,
            square,
            mu_tail - remainder,
        )
