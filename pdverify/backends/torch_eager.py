"""Trust-region masks in eager torch, on any device: ``torch-eager``.

Must agree with `pdverify.definitions`; importable by a trainer that has torch alone::

    from pdverify.backends.torch_eager import predictive_mask

Inputs are as a trainer has them (bf16, fp16 or fp32 logits `[B, L, V]`, behavior top-K
`[B, L, K]`); arithmetic is in `compute_dtype` (float32, or float64).  Every formula is in its
stable form (`docs/formulas.md`): log-ratios come from differences of logits, `pi - mu` from
`expm1` of the log-ratio, `1 - pi_k` from the sum of the others, tail masses from the tail's own
logits or from `expm1`, and coefficients from the complement form

    C = h_k (eps^2 + q) - sum_{j != k} h_j (pi_j + pi_k eps - q),    h_j = pi_j dD/dpi_j,
    eps = sum_{j != k} pi_j,   q = sum_{j != k} pi_j^2,

with the tail as one more cell whose own collision mass is `pi_T w`.  Masks, divergences and
coefficients carry no gradient.  Shapes may have any leading dimensions in place of `[B, L]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from pdverify.rules import Partition, Rule, Tail

Aggregation: TypeAlias = Literal["none", "token-mean", "sequence-mean", "fixed-length"]
CPU_BLOCK = 2**18
"""Logits per block of rows on a CPU: the temporaries of a block stay in its cache."""

DEVICE_BLOCK = 2**27
"""Logits per block of rows elsewhere, which bounds the memory of the temporaries."""

CellFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class _Cells:
    """Both policies on the cells of a partition: k, the others, and one tail cell.

    `mu`, `pi`, `gap` are `[..., M]`, unused slots (and k's) filled with 0; `gap` is
    `log pi - log mu`.  The rest are `[...]`; without a tail, its masses and gap are 0.  `excess`
    is `sum mu - sum pi`: stored log-probs may sum to a little more than 1.
    `tail_mean` is `w = sum_tail pi^2 / pi_T`, `tail_square` is `sum_tail pi^3 / pi_T`, both as the
    tail estimator has them.
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

    @property
    def rest(self) -> Tensor:
        """`1 - pi_k`, from the masses of the other cells."""
        return self.pi.sum(-1) + self.pi_tail

    @property
    def rest_collision(self) -> Tensor:
        """`sum_{j != k} pi_j^2` over the vocabulary, as the tail estimator has it."""
        return (self.pi * self.pi).sum(-1) + self.pi_tail * self.tail_mean


@dataclass(frozen=True)
class _Policy:
    """Training policy in log space: `log pi = shifted - log_norm`."""

    shifted: Tensor
    log_norm: Tensor

    def log_prob(self, ids: Tensor) -> Tensor:
        return self.shifted.gather(-1, ids) - self.log_norm[..., None]


def _policy(logits: Tensor, compute_dtype: torch.dtype) -> _Policy:
    z = logits.to(compute_dtype)
    shifted = z - z.amax(-1, keepdim=True)
    # log_softmax on CPU loses digits on peaked rows with a heavy bulk; the log of this sum does not
    return _Policy(shifted, shifted.exp().sum(-1).log())


def _gap(log_pi: Tensor, log_mu: Tensor) -> Tensor:
    """`log pi - log mu`, 0 where both probabilities are zero."""
    both_zero = torch.isneginf(log_pi) & torch.isneginf(log_mu)
    return torch.where(both_zero, 0.0, log_pi - log_mu)


def _difference(mu: Tensor, pi: Tensor, gap: Tensor) -> Tensor:
    """`pi - mu`, from the log-ratio: no cancellation, no overflow."""
    return torch.where(gap > 0, -pi * torch.expm1(-gap), mu * torch.expm1(gap))


def _times(mass: Tensor, factor: Tensor) -> Tensor:
    """`mass * factor` with `0 * inf = 0`."""
    return torch.where(mass > 0, mass * factor, 0.0)


def _log_cosh_half(gap: Tensor) -> tuple[Tensor, Tensor]:
    """(gap, log cosh(gap / 2)) with the gap clamped to where either mass is still visible."""
    gap = gap.clamp(-80.0, 80.0)
    return gap, torch.log1p(2 * torch.sinh(gap / 4) ** 2)


def _jensen_shannon_cell(mu: Tensor, pi: Tensor, gap: Tensor) -> Tensor:
    gap, log_cosh = _log_cosh_half(gap)
    return 0.5 * ((pi - mu) * gap / 2 - (pi + mu) * log_cosh)


def _jensen_shannon_moment(mu: Tensor, pi: Tensor, gap: Tensor) -> Tensor:
    gap, log_cosh = _log_cosh_half(gap)
    return 0.5 * pi * (gap / 2 - log_cosh)


def _hellinger_cell(mu: Tensor, pi: Tensor, gap: Tensor) -> Tensor:
    larger = torch.where(gap > 0, pi, mu)
    return 0.5 * larger * torch.expm1(-gap.abs() / 2) ** 2


def _hellinger_moment(mu: Tensor, pi: Tensor, gap: Tensor) -> Tensor:
    up = -pi * torch.expm1(-gap / 2)
    down = pi.sqrt() * mu.sqrt() * torch.expm1(gap / 2)
    return 0.5 * torch.where(gap > 0, up, down)


def _scaled(mass: Tensor, exponent: Tensor) -> Tensor:
    """`mass exp(exponent)`, 0 for mass 0; in two factors, so that it overflows only if it must."""
    root = torch.exp(exponent / 2)
    return torch.where(mass == 0, 0.0, mass * root * root)


def _chi2_cell(mu: Tensor, pi: Tensor, gap: Tensor) -> Tensor:
    change = torch.where(gap > 0, torch.expm1(-gap), 1.0)
    up = pi * change * change
    root = torch.exp(-gap / 2)
    down = _difference(mu, pi, gap) * torch.expm1(-gap / 2) * (1 + root)
    return torch.where(gap > 0, up, torch.where(mu > 0, down.abs(), 0.0))


def _chi2_moment(mu: Tensor, pi: Tensor, gap: Tensor) -> Tensor:
    change = _difference(mu, pi, gap)
    return change + _scaled(change, -gap)


def _reverse_chi2_moment(mu: Tensor, pi: Tensor, gap: Tensor) -> Tensor:
    return _scaled(2 * _difference(mu, pi, gap), gap)


# name -> (one cell's share of D, h = pi * dD/dpi of that cell), from (mu, pi, log pi - log mu)
_STABLE: dict[str, tuple[CellFunction, CellFunction]] = {
    "kl": (lambda mu, pi, gap: _difference(mu, pi, gap) - _times(mu, gap), _difference),
    "reverse-kl": (
        lambda mu, pi, gap: _times(pi, gap) - _difference(mu, pi, gap),
        lambda mu, pi, gap: _times(pi, gap),
    ),
    "tv": (
        lambda mu, pi, gap: 0.5 * _difference(mu, pi, gap).abs(),
        lambda mu, pi, gap: 0.5 * pi * gap.sign(),
    ),
    "jensen-shannon": (_jensen_shannon_cell, _jensen_shannon_moment),
    "squared-hellinger": (_hellinger_cell, _hellinger_moment),
    "chi2": (_chi2_cell, _chi2_moment),
    "reverse-chi2": (lambda mu, pi, gap: _chi2_cell(pi, mu, -gap), _reverse_chi2_moment),
}


# multiples of `sum mu - sum pi` that a centered cell above leaves out of D
_CENTERING = {"kl": 1.0, "reverse-kl": -1.0}


def _functions(name: str) -> tuple[CellFunction, CellFunction]:
    """The stable cell functions of a divergence, or its generic ones where it has none."""
    if name in _STABLE:
        return _STABLE[name]
    from pdverify.definitions.divergences import DIVERGENCES

    formula = DIVERGENCES[name]
    return (
        lambda mu, pi, _: formula.cell(mu, pi, xp=torch),
        lambda mu, pi, _: formula.moment(mu, pi, xp=torch),
    )


def _full_cells(pi: _Policy, tokens: Tensor, mu: _Policy) -> _Cells:
    log_pi = pi.shifted - pi.log_norm[..., None]
    log_mu = mu.shifted - mu.log_norm[..., None]
    # differences of logits first: exact where the two policies are close
    gap = (pi.shifted - mu.shifted) - (pi.log_norm - mu.log_norm)[..., None]
    gap = torch.where(torch.isneginf(log_pi) & torch.isneginf(log_mu), 0.0, gap)
    k = tokens[..., None]

    def split(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.scatter(-1, k, 0.0), x.gather(-1, k)[..., 0]

    mu_others, mu_k = split(log_mu.exp())
    pi_others, pi_k = split(log_pi.exp())
    gap_others, gap_k = split(gap)
    none = torch.zeros_like(pi_k)
    tail = (none, none, none, none, none)
    return _Cells(mu_others, pi_others, gap_others, mu_k, pi_k, gap_k, *tail, excess=none)


def _remainder(log_mu: Tensor) -> Tensor:
    """`1 - sum exp(log_mu)`, the largest mass through expm1."""
    top, where = log_mu.max(-1, keepdim=True)
    others = log_mu.exp().scatter(-1, where, 0.0).sum(-1)
    return -torch.expm1(top[..., 0]) - others


def _coarse_cells(
    pi: _Policy, tokens: Tensor, log_mu_k: Tensor, ids: Tensor, log_mu: Tensor, tail: Tail | None
) -> _Cells:
    """Cells {k}, the other retained tokens, and the tail; `ids`, `log_mu` are `[..., K]`."""
    retained = (ids != tokens[..., None]) & ~torch.isneginf(log_mu)
    log_mu = torch.where(retained, log_mu, float("-inf"))
    k = tokens[..., None]
    log_pi_k = pi.log_prob(k)[..., 0]
    log_pi = torch.where(retained, pi.log_prob(ids), float("-inf"))

    rest = pi.shifted.scatter(-1, k, float("-inf"))
    # amin: an unretained slot may repeat the id of k, which must stay excluded
    hidden = torch.where(retained, float("-inf"), rest.gather(-1, ids))
    rest = rest.scatter_reduce(-1, ids, hidden, "amin")
    top = rest.amax(-1)
    safe_top = torch.where(torch.isneginf(top), 0.0, top)
    weight = (rest - safe_top[..., None]).exp()
    total = weight.sum(-1)
    log_pi_tail = safe_top + total.log() - pi.log_norm
    pi_tail = log_pi_tail.exp()
    tail_cells = pi.shifted.shape[-1] - 1 - retained.sum(-1)
    if tail == "aggregated":
        tail_mean, tail_square = pi_tail, pi_tail * pi_tail
    elif tail == "uniform":
        tail_mean = pi_tail / tail_cells.clamp_min(1)
        tail_square = tail_mean * tail_mean
    else:
        scale = (safe_top - pi.log_norm).exp()
        empty = total == 0
        safe_total = torch.where(empty, 1.0, total)
        tail_mean = (weight * weight).sum(-1) / safe_total * scale
        tail_square = (weight * weight * weight).sum(-1) / safe_total * scale * scale

    remainder = _remainder(torch.cat([log_mu, log_mu_k[..., None]], -1))
    mu_tail = torch.where(tail_cells > 0, remainder.clamp_min(0.0), 0.0)
    return _Cells(
        log_mu.exp(),
        log_pi.exp(),
        torch.where(retained, log_pi - log_mu, 0.0),
        log_mu_k.exp(),
        log_pi_k.exp(),
        log_pi_k - log_mu_k,
        mu_tail,
        pi_tail,
        _gap(log_pi_tail, mu_tail.log()),
        tail_mean,
        tail_square,
        mu_tail - remainder,
    )


@dataclass(frozen=True)
class _Inputs:
    """The inputs of one call; `rows` checks them and flattens the leading dimensions."""

    logits: Tensor
    tokens: Tensor
    partition: Partition
    behavior_logits: Tensor | None
    behavior_logprobs: Tensor | None
    topk_ids: Tensor | None
    topk_logprobs: Tensor | None
    compute_dtype: torch.dtype

    def rows(self) -> _Inputs:
        """Logits as `[T, V]`, the rest alike; raises what `divergence` says."""
        lead, size = self.tokens.shape, self.logits.shape[-1]
        wanted: dict[str, tuple[int | str, ...]] = {"logits": (*lead, size)}
        if self.partition == "full":
            wanted["behavior_logits"] = (*lead, size)
        else:
            wanted["behavior_logprobs"] = tuple(lead)
        if self.partition == "topk":
            listed = None if self.topk_ids is None else self.topk_ids.shape[-1]
            wanted["topk_ids"] = wanted["topk_logprobs"] = (*lead, listed or "K")
        flat: dict[str, Tensor] = {"tokens": self.tokens.reshape(-1)}
        for name, shape in wanted.items():
            tensor = getattr(self, name)
            if tensor is None:
                raise ValueError(f"{name} = None: the {self.partition} view needs it")
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name}.shape = {tuple(tensor.shape)}: expected {shape}")
            flat[name] = tensor.reshape(-1, *tensor.shape[len(lead) :])
        return replace(self, **flat)  # type: ignore[arg-type]

    def take(self, rows: slice) -> _Inputs:
        """A block of the flattened rows."""
        tensors = {k: v[rows] for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **tensors)  # type: ignore[arg-type]


def _by_blocks(inputs: _Inputs, function: Callable[[_Inputs, slice], Tensor]) -> Tensor:
    """`function` on blocks of rows whose temporaries fit the cache, joined: `[B, L]`."""
    flat = inputs.rows()
    count, size = flat.logits.shape
    step = max(1, (CPU_BLOCK if flat.logits.device.type == "cpu" else DEVICE_BLOCK) // size)
    blocks = [slice(start, start + step) for start in range(0, count, step)]
    parts = [function(flat.take(block), block) for block in blocks]
    return torch.cat(parts).reshape(inputs.tokens.shape)


def _cells(inputs: _Inputs, tail: Tail | None) -> _Cells:
    """The cells of one block of rows."""
    pi, tokens = _policy(inputs.logits, inputs.compute_dtype), inputs.tokens
    if inputs.partition == "full":
        assert inputs.behavior_logits is not None
        return _full_cells(pi, tokens, _policy(inputs.behavior_logits, inputs.compute_dtype))
    assert inputs.behavior_logprobs is not None
    log_mu_k = inputs.behavior_logprobs.to(inputs.compute_dtype)
    if inputs.partition == "binary":
        return _coarse_cells(pi, tokens, log_mu_k, tokens[:, None], log_mu_k[:, None], tail)
    assert inputs.topk_ids is not None
    assert inputs.topk_logprobs is not None
    log_mu = inputs.topk_logprobs.to(inputs.compute_dtype)
    return _coarse_cells(pi, tokens, log_mu_k, inputs.topk_ids, log_mu, tail)


def _divergence(cells: _Cells, name: str) -> Tensor:
    cell, _ = _functions(name)
    total = cell(cells.mu, cells.pi, cells.gap).sum(-1)
    total = total + cell(cells.mu_k, cells.pi_k, cells.gap_k)
    total = total + cell(cells.mu_tail, cells.pi_tail, cells.gap_tail)
    return (total + _CENTERING.get(name, 0.0) * cells.excess).clamp_min(0.0)


def _coefficient(cells: _Cells, name: str) -> Tensor:
    _, moment = _functions(name)
    eps, q = cells.rest, cells.rest_collision
    shift = cells.pi_k * eps - q
    h = moment(cells.mu, cells.pi, cells.gap)
    h_k = moment(cells.mu_k, cells.pi_k, cells.gap_k)
    h_tail = moment(cells.mu_tail, cells.pi_tail, cells.gap_tail)
    local = h_k * (eps * eps + q)
    return local - (h * (cells.pi + shift[..., None])).sum(-1) - h_tail * (cells.tail_mean + shift)


def _kl_curvature(cells: _Cells) -> Tensor:
    """Second derivative of forward KL along the frozen direction `u_i = 1[i = k] - pi_i`.

    `Var_pi(u) - mu_T Var_tail(u)`, with u shifted by `eps` so that k's value is exactly 0.
    """
    eps = cells.rest
    shifted = cells.pi + eps[..., None]
    w, w2 = cells.tail_mean, cells.tail_square
    tail_first, tail_second = w + eps, w2 + 2 * eps * w + eps * eps
    mean = (cells.pi * shifted).sum(-1) + cells.pi_tail * tail_first
    square = (cells.pi * shifted * shifted).sum(-1) + cells.pi_tail * tail_second
    return square - mean * mean - cells.mu_tail * (w2 - w * w)


@torch.no_grad()
def divergence(
    logits: Tensor,
    tokens: Tensor,
    *,
    name: str,
    partition: Partition = "topk",
    behavior_logits: Tensor | None = None,
    behavior_logprobs: Tensor | None = None,
    topk_ids: Tensor | None = None,
    topk_logprobs: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Divergence `D(mu, pi)` of every token, `[B, L]` (nats; probability for total variation).

    Args:
        logits: `[B, L, V]` training-policy logits, any floating dtype; -inf is probability zero.
        tokens: `[B, L]` int64, sampled ids.
        name: a divergence of the registry (``kl`` is the forward one, `KL(mu || pi)`).
        partition: cells it is taken on: ``full`` needs `behavior_logits` `[B, L, V]`, ``topk``
            needs `topk_ids`, `topk_logprobs` `[B, L, K]` (distinct ids) and `behavior_logprobs`
            `[B, L]`, ``binary`` needs `behavior_logprobs`.
        compute_dtype: float32 or float64.

    Raises:
        ValueError: an input that the partition needs is missing or has another shape.

    Source: arXiv 2607.10848; `docs/formulas.md`.
    """
    inputs = _Inputs(
        logits,
        tokens,
        partition,
        behavior_logits,
        behavior_logprobs,
        topk_ids,
        topk_logprobs,
        compute_dtype,
    )
    return _by_blocks(inputs, lambda block, _: _divergence(_cells(block, "exact"), name))


@torch.no_grad()
def coefficient(
    logits: Tensor,
    tokens: Tensor,
    *,
    name: str,
    partition: Partition = "topk",
    tail: Tail | None = "exact",
    behavior_logits: Tensor | None = None,
    behavior_logprobs: Tensor | None = None,
    topk_ids: Tensor | None = None,
    topk_logprobs: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Coefficient `C` of every token, `[B, L]`: a step moves the divergence by `eta A r C`.

    `tail` chooses the tail's collision mass: ``aggregated`` (the tail is one token), ``uniform``
    (the tail is flat) or ``exact`` (summed from `logits`).  Other arguments and errors as in
    `divergence`.

    Source: arXiv 2607.10848; the complement form of `docs/formulas.md`.
    """
    if tail == "bracket":
        raise ValueError("tail = bracket: a bracket has two coefficients; ask for each end")
    inputs = _Inputs(
        logits,
        tokens,
        partition,
        behavior_logits,
        behavior_logprobs,
        topk_ids,
        topk_logprobs,
        compute_dtype,
    )
    return _by_blocks(inputs, lambda block, _: _coefficient(_cells(block, tail), name))


@torch.no_grad()
def keep_mask(
    logits: Tensor,
    tokens: Tensor,
    advantages: Tensor,
    *,
    rule: Rule,
    behavior_logits: Tensor | None = None,
    behavior_logprobs: Tensor | None = None,
    topk_ids: Tensor | None = None,
    topk_logprobs: Tensor | None = None,
    response_mask: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Keep mask of any rule, bool `[B, L]`; padding is False.

    `advantages` is `[B, L]`; `response_mask` (bool `[B, L]`) marks the valid tokens.  A token
    whose D or C is NaN is dropped: a comparison with NaN must not let it through.  Other
    arguments and errors as in `divergence`.

    Source: arXiv 2607.10848; `pdverify.rules` has the table of rules.
    """
    if advantages.shape != tokens.shape:
        raise ValueError(
            f"advantages.shape = {tuple(advantages.shape)}: expected {tuple(tokens.shape)}"
        )
    valid = torch.ones_like(tokens, dtype=torch.bool) if response_mask is None else response_mask
    if rule.direction == "none":
        return valid.clone()
    # ids on padding are anything (-1, -100): never an index
    tokens = tokens.masked_fill(~valid, 0)
    if topk_ids is not None:
        topk_ids = topk_ids.masked_fill(~valid[..., None], 0)
    partition: Partition = "binary" if rule.direction == "clip" else rule.partition
    if partition != "full" and behavior_logprobs is None and behavior_logits is not None:
        behavior = _policy(behavior_logits, compute_dtype)
        behavior_logprobs = behavior.log_prob(tokens[..., None])[..., 0]
    inputs = _Inputs(
        logits,
        tokens,
        partition,
        behavior_logits,
        behavior_logprobs,
        topk_ids,
        topk_logprobs,
        compute_dtype,
    )
    moved = advantages.reshape(-1).to(compute_dtype)
    kept = _by_blocks(inputs, lambda block, rows: _keeps(block, rule, moved[rows]))
    return valid & (kept | (advantages == 0))


def _keeps(inputs: _Inputs, rule: Rule, advantages: Tensor) -> Tensor:
    """Whether a rule keeps each row of a block; rows with A = 0 are left to the caller."""
    sign = advantages.sign()
    if rule.direction == "clip":
        gap = _cells(inputs, "exact").gap_k
        low = _log_or_minus_inf(1 - rule.clip_low)
        return torch.where(sign > 0, gap <= math.log1p(rule.clip_high), gap >= low)
    ends: tuple[Tail | None, ...] = (
        ("aggregated", "uniform") if rule.tail == "bracket" else (rule.tail,)
    )
    kept = torch.zeros_like(sign, dtype=torch.bool)
    for tail in ends:
        kept |= _end_keeps(_cells(inputs, tail), rule, sign, advantages)
    return kept


def _log_or_minus_inf(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def _end_keeps(cells: _Cells, rule: Rule, sign: Tensor, advantages: Tensor) -> Tensor:
    """Whether a rule keeps each token, with one tail estimator."""
    assert rule.divergence is not None
    delta = torch.full_like(sign, rule.delta_low).masked_fill(sign > 0, rule.delta_high)
    distance = _divergence(cells, rule.divergence)
    if rule.direction == "ratio":
        return (distance <= delta) | (sign * cells.gap_k <= 0)
    change = _coefficient(cells, rule.divergence)
    if rule.direction == "second-order":
        if rule.divergence != "kl":
            raise ValueError(f"divergence = {rule.divergence}: the second order is known for kl")
        step = rule.eta * advantages * cells.gap_k.exp()
        distance = distance + step * change + step * step * _kl_curvature(cells) / 2
    return (distance <= delta) | (sign * change <= 0)


def predictive_mask(
    logits: Tensor,
    tokens: Tensor,
    advantages: Tensor,
    *,
    behavior_logits: Tensor | None = None,
    behavior_logprobs: Tensor | None = None,
    topk_ids: Tensor | None = None,
    topk_logprobs: Tensor | None = None,
    response_mask: Tensor | None = None,
    divergence: str = "kl",
    tail: Tail = "exact",
    delta: float = 0.15,
    delta_low: float | None = None,
    delta_high: float | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Predictive divergence mask: bool `[B, L]`, True where the token's gradient is kept.

    Drops a token when `D > delta` and `A C > 0`: it is outside the trust region, and the next
    policy-gradient step would increase the same divergence.  With `topk_ids` the divergence is
    taken on the retained support (top-K and sampled token) plus a tail cell; otherwise on the
    full vocabulary, from `behavior_logits`.  `delta_low` (for `A < 0`) and `delta_high` (for
    `A > 0`) default to `delta` (the paper trains with K = 20 and 0.15 nats).

    Other arguments, shapes and errors as in `divergence` and `keep_mask`.

    Source: arXiv 2607.10848.
    """
    partition: Partition = "full" if topk_ids is None else "topk"
    rule = Rule(
        mask=f"predictive-{divergence}",
        direction="predictive",
        divergence=divergence,
        partition=partition,
        tail=None if partition == "full" else tail,
        delta_low=delta if delta_low is None else delta_low,
        delta_high=delta if delta_high is None else delta_high,
    )
    return keep_mask(
        logits,
        tokens,
        advantages,
        rule=rule,
        behavior_logits=behavior_logits,
        behavior_logprobs=behavior_logprobs,
        topk_ids=topk_ids,
        topk_logprobs=topk_logprobs,
        response_mask=response_mask,
        compute_dtype=compute_dtype,
    )


def policy_loss(
    logits: Tensor,
    tokens: Tensor,
    advantages: Tensor,
    behavior_logprobs: Tensor,
    keep: Tensor,
    *,
    response_mask: Tensor | None = None,
    ratio_cap: float = 20.0,
    aggregation: Aggregation = "token-mean",
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Masked policy loss `-A sg(min(r, cap)) keep log pi_k`, per token or aggregated.

    The mask and the importance ratio `r = pi_k / mu_k` carry no gradient.  Dropped and padded
    places contribute exactly 0 to the value and to the gradient, whatever they hold.

    Args:
        logits: `[B, L, V]`, the only input that gets a gradient.
        behavior_logprobs: `[B, L]` log-probs of the sampled tokens (nats).
        keep: bool `[B, L]`, from a mask.
        ratio_cap: upper bound of the importance ratio, > 0.
        aggregation: ``none`` gives `[B, L]`; ``token-mean`` divides by the number of valid
            tokens, ``sequence-mean`` averages over valid tokens, then over the sequences that
            have any, ``fixed-length`` divides by `B * L`.

    Raises:
        ValueError: unknown aggregation, or `ratio_cap` not positive.
    """
    if not ratio_cap > 0:
        raise ValueError(f"ratio_cap = {ratio_cap}: a cap on the importance ratio is positive")
    valid = torch.ones_like(keep) if response_mask is None else response_mask
    active = keep & valid & (advantages != 0)
    # select before exp and log: a where behind them still has a NaN gradient
    pi = _policy(logits.masked_fill(~active[..., None], 0.0), compute_dtype)
    log_pi = pi.log_prob(tokens.masked_fill(~active, 0)[..., None])[..., 0]
    gap = log_pi.detach() - behavior_logprobs.masked_fill(~active, 0.0).to(compute_dtype)
    weight = gap.clamp_max(math.log(ratio_cap)).exp()
    scale = advantages.masked_fill(~active, 0.0).to(compute_dtype) * weight
    # r = 0 contributes 0, the limit of r log pi_k
    loss = torch.where(scale != 0, -scale * log_pi, 0.0)
    return aggregate(loss, valid, aggregation)


def aggregate(loss: Tensor, valid: Tensor, aggregation: Aggregation) -> Tensor:
    """Aggregate a per-token loss `[B, L]` over the `valid` tokens; see `policy_loss`."""
    if aggregation == "none":
        return loss
    lengths = valid.sum(-1)
    if aggregation == "token-mean":
        return loss.sum() / lengths.sum().clamp_min(1)
    if aggregation == "sequence-mean":
        per_sequence = loss.sum(-1) / lengths.clamp_min(1)
        return per_sequence.sum() / (lengths > 0).sum().clamp_min(1)
    if aggregation == "fixed-length":
        return loss.sum() / valid.numel()
    raise ValueError(
        f"aggregation = {aggregation}: known: none, token-mean, sequence-mean, fixed-length"
    )
