"""Trust-region masks and their policy loss in torch, whatever reads the logits.

`TorchBackend` has the functions that every torch backend offers under the same names; what differs
between backends is the `Engine` that takes sums over the vocabulary.  Must agree with
`pdverify.definitions`; every formula is in its stable form (`docs/formulas.md`).

Shapes may have any leading dimensions in place of `[B, L]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdverify.backends.engine import Engine
from pdverify.backends.losses import Aggregation, aggregate, log_prob
from pdverify.backends.sums import CoarseView, FullView, Retained, Sums
from pdverify.rules import Partition, Rule, Tail


@dataclass(frozen=True)
class _View:
    """Both policies on the cells of a partition, one number a row.

    `sums(name, tail)` gives the sums of a divergence; `norm` is the training policy's
    log-normalizer (see `Engine`), `log_pi_k` and `log_mu_k` the log-probs of k.
    """

    sums: Callable[[str, Tail | None], Sums]
    norm: Tensor
    log_pi_k: Tensor
    log_mu_k: Tensor


class TorchBackend:
    """Divergences, coefficients, masks and losses over one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def _view(
        self,
        logits: Any,
        tokens: Tensor,
        partition: Partition,
        behavior: Behavior,
        compute: torch.dtype,
    ) -> _View:
        engine, lead = self.engine, tuple(tokens.shape)
        logits, k = engine.rows(logits, lead, "logits"), tokens.reshape(-1)
        if partition == "full":
            other = behavior.need("behavior_logits", "full")
            other = engine.rows(other, lead, "behavior_logits", logits.shape[-1])
            moments = engine.full(logits, other, k, compute)
            z_k, y_k = (engine.gather(x, k[:, None])[:, 0] for x in (logits, other))
            full = FullView(moments, z_k, y_k)
            norms = full.norm, full.behavior_norm

            def sums(name: str, tail: Tail | None) -> Sums:
                # float64 sums have no digits to spare: where one token has nearly all of the mass,
                # combinations of moments cancel
                if name in engine.from_moments and compute == torch.float32:
                    return full.sums(name, None)
                cells = engine.cell_sums(logits, other, k, *norms, name, compute)
                return full.sums(name, cells)

            return _View(sums, full.norm, full.log_pi_k, full.log_mu_k)
        support = behavior.support(partition, k, lead)
        ids, excluded = support.excluded(k)
        tail_moments = engine.tail(logits, ids, excluded, compute)
        z = engine.gather(logits, ids)
        coarse = CoarseView(support, tail_moments, z[:, :-1], z[:, -1], logits.shape[-1])

        def cell_sums(name: str, tail: Tail | None) -> Sums:
            return coarse.cells(tail).sums(name)

        return _View(cell_sums, coarse.norm, coarse.log_pi_k, support.log_mu_k)

    def _log_prob(self, logits: Any, k: Tensor, compute: torch.dtype) -> tuple[Tensor, Tensor]:
        """Log-prob of k, float64 `[T]`, and the log-normalizer."""
        nothing = torch.zeros(len(k), dtype=torch.float64, device=k.device)
        support = Retained.of(k, k[:, None], nothing[:, None], nothing)
        ids, excluded = support.excluded(k)
        z = self.engine.gather(logits, ids)
        moments = self.engine.tail(logits, ids, excluded, compute)
        view = CoarseView(support, moments, z[:, :-1], z[:, -1], logits.shape[-1])
        return view.log_pi_k, view.norm

    @torch.no_grad()
    def divergence(
        self,
        logits: Any,
        tokens: Tensor,
        *,
        name: str,
        partition: Partition = "topk",
        behavior_logits: Any = None,
        behavior_logprobs: Tensor | None = None,
        topk_ids: Tensor | None = None,
        topk_logprobs: Tensor | None = None,
        compute_dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Divergence `D(mu, pi)` of every token, `[B, L]` (nats; probability for total variation).

        Args:
            logits: `[B, L, V]` training-policy logits, any floating dtype; -inf is probability
                zero.  Some backends take what logits are made from instead, and say so.
            tokens: `[B, L]` int64, sampled ids.
            name: a divergence of the registry (``kl`` is the forward one, `KL(mu || pi)`).
            partition: cells it is taken on: ``full`` needs `behavior_logits` `[B, L, V]`,
                ``topk`` needs `topk_ids`, `topk_logprobs` `[B, L, K]` (distinct ids) and
                `behavior_logprobs` `[B, L]`, ``binary`` needs `behavior_logprobs`.
            compute_dtype: float32 or float64: the arithmetic inside a block of the vocabulary,
                and the dtype of the result.

        Raises:
            ValueError: an input that the partition needs is missing or has another shape.

        Source: arXiv 2607.10848; `docs/formulas.md`.
        """
        behavior = Behavior(behavior_logits, behavior_logprobs, topk_ids, topk_logprobs)
        view = self._view(logits, tokens, partition, behavior, compute_dtype)
        found = view.sums(name, "exact").divergence(name)
        return found.to(compute_dtype).reshape(tokens.shape)

    @torch.no_grad()
    def coefficient(
        self,
        logits: Any,
        tokens: Tensor,
        *,
        name: str,
        partition: Partition = "topk",
        tail: Tail | None = "exact",
        behavior_logits: Any = None,
        behavior_logprobs: Tensor | None = None,
        topk_ids: Tensor | None = None,
        topk_logprobs: Tensor | None = None,
        compute_dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Coefficient `C` of every token, `[B, L]`: a step moves the divergence by `eta A r C`.

        `tail` chooses the tail's collision mass: ``aggregated`` (the tail is one token),
        ``uniform`` (the tail is flat) or ``exact`` (summed from `logits`).  Other arguments and
        errors as in `divergence`.

        Source: arXiv 2607.10848; the complement form of `docs/formulas.md`.
        """
        if tail == "bracket":
            raise ValueError("tail = bracket: a bracket has two coefficients; ask for each end")
        behavior = Behavior(behavior_logits, behavior_logprobs, topk_ids, topk_logprobs)
        view = self._view(logits, tokens, partition, behavior, compute_dtype)
        found = view.sums(name, tail).coefficient(name)
        return found.to(compute_dtype).reshape(tokens.shape)

    @torch.no_grad()
    def keep_mask(
        self,
        logits: Any,
        tokens: Tensor,
        advantages: Tensor,
        *,
        rule: Rule,
        behavior_logits: Any = None,
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
        behavior = Behavior(behavior_logits, behavior_logprobs, topk_ids, topk_logprobs)
        valid, tokens, behavior = _door(tokens, advantages, response_mask, behavior)
        if rule.direction == "none":
            return valid.clone()
        keep, _ = self._decide(logits, tokens, advantages, rule, behavior, compute_dtype)
        return valid & keep

    def _decide(
        self,
        logits: Any,
        tokens: Tensor,
        advantages: Tensor,
        rule: Rule,
        behavior: Behavior,
        compute: torch.dtype,
    ) -> tuple[Tensor, _View]:
        """What a rule keeps, `[B, L]`, and the sums that it is decided from."""
        partition: Partition = "binary" if rule.direction == "clip" else rule.partition
        if partition != "full" and behavior.logprobs is None and behavior.logits is not None:
            other = self.engine.rows(behavior.logits, tuple(tokens.shape), "behavior_logits")
            found, _ = self._log_prob(other, tokens.reshape(-1), compute)
            behavior = behavior.with_logprobs(found.reshape(tokens.shape))
        view = self._view(logits, tokens, partition, behavior, compute)
        moved = advantages.reshape(-1).double()
        keep = _keeps(view, rule, moved) | (moved == 0)
        return keep.reshape(tokens.shape), view

    def predictive_mask(
        self,
        logits: Any,
        tokens: Tensor,
        advantages: Tensor,
        *,
        behavior_logits: Any = None,
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
        policy-gradient step would increase the same divergence.  With `topk_ids` the divergence
        is taken on the retained support (top-K and sampled token) plus a tail cell; otherwise on
        the full vocabulary, from `behavior_logits`.  `delta_low` (for `A < 0`) and `delta_high`
        (for `A > 0`) default to `delta` (the paper trains with K = 20 and 0.15 nats).

        Other arguments, shapes and errors as in `divergence` and `keep_mask`.

        Source: arXiv 2607.10848.
        """
        return self.keep_mask(
            logits,
            tokens,
            advantages,
            rule=_predictive(divergence, topk_ids is None, tail, delta, delta_low, delta_high),
            behavior_logits=behavior_logits,
            behavior_logprobs=behavior_logprobs,
            topk_ids=topk_ids,
            topk_logprobs=topk_logprobs,
            response_mask=response_mask,
            compute_dtype=compute_dtype,
        )

    def log_prob(
        self, logits: Any, tokens: Tensor, *, compute_dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Log-prob of each sampled token, `[B, L]` nats in `compute_dtype`, with its gradient.

        The backward pass computes the softmax anew: nothing of the size of the logits is kept.
        Shapes and errors as in `divergence`.
        """
        rows, k = self.engine.rows(logits, tuple(tokens.shape), "logits"), tokens.reshape(-1)

        def evaluate(detached: Any) -> tuple[Tensor, Tensor]:
            return self._log_prob(detached, k, compute_dtype)

        (found,) = log_prob(self.engine, rows, k, compute_dtype, evaluate)
        return found.reshape(tokens.shape)

    def policy_loss(
        self,
        logits: Any,
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
        valid = torch.ones_like(keep) if response_mask is None else response_mask
        log_pi = self.log_prob(logits, tokens.masked_fill(~valid, 0), compute_dtype=compute_dtype)
        loss = _surrogate(log_pi, behavior_logprobs, advantages, keep & valid, ratio_cap)
        return aggregate(loss, valid, aggregation)

    def predictive_policy_loss(
        self,
        logits: Any,
        tokens: Tensor,
        advantages: Tensor,
        *,
        behavior_logits: Any = None,
        behavior_logprobs: Tensor | None = None,
        topk_ids: Tensor | None = None,
        topk_logprobs: Tensor | None = None,
        response_mask: Tensor | None = None,
        divergence: str = "kl",
        tail: Tail = "exact",
        delta: float = 0.15,
        delta_low: float | None = None,
        delta_high: float | None = None,
        ratio_cap: float = 20.0,
        aggregation: Aggregation = "token-mean",
        compute_dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Policy loss under the predictive divergence mask, from one reading of the logits.

        `policy_loss` with the mask of `predictive_mask`: the mask and the importance ratio carry
        no gradient.  Without `behavior_logprobs` the full view takes them from
        `behavior_logits`.  Arguments, shapes and errors as in those two.

        Source: arXiv 2607.10848.
        """
        rule = _predictive(divergence, topk_ids is None, tail, delta, delta_low, delta_high)
        behavior = Behavior(behavior_logits, behavior_logprobs, topk_ids, topk_logprobs)
        valid, tokens, behavior = _door(tokens, advantages, response_mask, behavior)
        shape = tuple(tokens.shape)

        def evaluate(detached: Any) -> tuple[Tensor, ...]:
            keep, view = self._decide(detached, k, moved, rule, flat, compute_dtype)
            return view.log_pi_k, view.norm, keep, view.log_mu_k

        k, moved, flat = tokens.reshape(-1), advantages.reshape(-1), behavior.flattened(shape)
        rows = self.engine.rows(logits, shape, "logits")
        log_pi, keep, log_mu_k = log_prob(self.engine, rows, k, compute_dtype, evaluate)
        if behavior_logprobs is not None:
            log_mu_k = behavior_logprobs
        keep = keep.reshape(shape) & valid
        log_mu_k, log_pi = log_mu_k.reshape(shape), log_pi.reshape(shape)
        loss = _surrogate(log_pi, log_mu_k, advantages, keep, ratio_cap)
        return aggregate(loss, valid, aggregation)


@dataclass(frozen=True)
class Behavior:
    """What is known of the behavior policy: full logits `[B, L, V]`, or log-probs of a part."""

    logits: Any = None
    logprobs: Tensor | None = None
    topk_ids: Tensor | None = None
    topk_logprobs: Tensor | None = None

    def need(self, name: str, partition: Partition) -> Any:
        """An input that a partition cannot do without.

        Raises:
            ValueError: it is None.
        """
        found = getattr(self, name.removeprefix("behavior_"))
        if found is None:
            raise ValueError(f"{name} = None: the {partition} view needs it")
        return found

    def with_logprobs(self, logprobs: Tensor) -> Behavior:
        """The same with log-probs of the sampled tokens."""
        return Behavior(self.logits, logprobs, self.topk_ids, self.topk_logprobs)

    def flattened(self, lead: tuple[int, ...]) -> Behavior:
        """Leading dimensions `lead` joined into one."""

        def flat(x: Any) -> Any:
            return None if x is None else x.reshape(-1, *x.shape[len(lead) :])

        return Behavior(*(flat(getattr(self, name)) for name in self.__dataclass_fields__))

    def support(self, partition: Partition, k: Tensor, lead: tuple[int, ...]) -> Retained:
        """The retained support of a coarse partition; `k` is `[T]`."""
        log_mu_k = self.need("behavior_logprobs", partition)
        if tuple(log_mu_k.shape) != lead:
            raise ValueError(f"behavior_logprobs.shape = {tuple(log_mu_k.shape)}: expected {lead}")
        log_mu_k = log_mu_k.reshape(-1).double()
        if partition == "binary":
            return Retained.of(k, k[:, None], log_mu_k[:, None], log_mu_k)
        ids, log_mu = self.need("topk_ids", partition), self.need("topk_logprobs", partition)
        for name, listed in (("topk_ids", ids), ("topk_logprobs", log_mu)):
            shape = (*lead, ids.shape[-1])
            if tuple(listed.shape) != shape:
                raise ValueError(f"{name}.shape = {tuple(listed.shape)}: expected {shape}")
        count = ids.shape[-1]
        return Retained.of(k, ids.reshape(-1, count), log_mu.reshape(-1, count).double(), log_mu_k)


def _door(
    tokens: Tensor, advantages: Tensor, response_mask: Tensor | None, behavior: Behavior
) -> tuple[Tensor, Tensor, Behavior]:
    """Valid places, and ids that can be looked up: on padding they are anything (-1, -100)."""
    if advantages.shape != tokens.shape:
        raise ValueError(
            f"advantages.shape = {tuple(advantages.shape)}: expected {tuple(tokens.shape)}"
        )
    if response_mask is None:
        return torch.ones_like(tokens, dtype=torch.bool), tokens, behavior
    if behavior.topk_ids is not None:
        ids = behavior.topk_ids.masked_fill(~response_mask[..., None], 0)
        behavior = Behavior(behavior.logits, behavior.logprobs, ids, behavior.topk_logprobs)
    return response_mask, tokens.masked_fill(~response_mask, 0), behavior


def _predictive(
    divergence: str,
    full: bool,
    tail: Tail,
    delta: float,
    delta_low: float | None,
    delta_high: float | None,
) -> Rule:
    return Rule(
        mask=f"predictive-{divergence}",
        direction="predictive",
        divergence=divergence,
        partition="full" if full else "topk",
        tail=None if full else tail,
        delta_low=delta if delta_low is None else delta_low,
        delta_high=delta if delta_high is None else delta_high,
    )


def _keeps(view: _View, rule: Rule, advantages: Tensor) -> Tensor:
    """Whether a rule keeps each row; rows with A = 0 are left to the caller."""
    sign = advantages.sign()
    if rule.direction == "clip":
        gap = view.sums("kl", None).gap_k
        low = math.log(1 - rule.clip_low) if rule.clip_low < 1 else -math.inf
        return torch.where(sign > 0, gap <= math.log1p(rule.clip_high), gap >= low)
    ends: tuple[Tail | None, ...] = (
        ("aggregated", "uniform") if rule.tail == "bracket" else (rule.tail,)
    )
    assert rule.divergence is not None
    kept = torch.zeros_like(sign, dtype=torch.bool)
    for tail in ends:
        kept |= _end_keeps(view.sums(rule.divergence, tail), rule, sign, advantages)
    return kept


def _end_keeps(sums: Sums, rule: Rule, sign: Tensor, advantages: Tensor) -> Tensor:
    """Whether a rule keeps each token, with one tail estimator."""
    assert rule.divergence is not None
    delta = torch.full_like(sign, rule.delta_low).masked_fill(sign > 0, rule.delta_high)
    distance = sums.divergence(rule.divergence)
    if rule.direction == "ratio":
        return (distance <= delta) | (sign * sums.gap_k <= 0)
    change = sums.coefficient(rule.divergence)
    if rule.direction == "second-order":
        if rule.divergence != "kl":
            raise ValueError(f"divergence = {rule.divergence}: the second order is known for kl")
        step = rule.eta * advantages * sums.gap_k.exp()
        distance = distance + step * change + step * step * sums.kl_curvature() / 2
    return (distance <= delta) | (sign * change <= 0)


def _surrogate(
    log_pi: Tensor, behavior_logprobs: Tensor, advantages: Tensor, keep: Tensor, ratio_cap: float
) -> Tensor:
    """`-A sg(min(r, cap)) log pi_k` where kept, exactly 0 elsewhere; `[B, L]`."""
    if not ratio_cap > 0:
        raise ValueError(f"ratio_cap = {ratio_cap}: a cap on the importance ratio is positive")
    active = keep & (advantages != 0)
    gap = log_pi.detach() - behavior_logprobs.to(log_pi.dtype)
    weight = gap.masked_fill(~active, 0.0).clamp_max(math.log(ratio_cap)).exp()
    scale = advantages.masked_fill(~active, 0.0).to(log_pi.dtype) * weight
    # r = 0 contributes 0, the limit of r log pi_k
    return torch.where(scale != 0, -scale * log_pi, 0.0)
