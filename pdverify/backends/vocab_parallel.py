"""Trust-region masks from logits sharded over ranks along the vocabulary: ``vocab-parallel``.

Must agree with `pdverify.definitions` on the logits of all ranks together::

    from pdverify.backends.vocab_parallel import Shard, predictive_policy_loss

    loss = predictive_policy_loss(Shard(logits, start, size), tokens, advantages, ...)

The functions are those of `pdverify.backends.masks.TorchBackend`, with a `Shard` where they take
`logits` and `behavior_logits`; every other argument is the same on all ranks.  Each rank calls the
same functions in the same order, gets the same bits back, and the gradient of its own columns.

Ranks exchange float64 numbers, none of which depend on the vocabulary size:

- top-K view: `8 (K + 5)` bytes a token (the K + 1 logits of the support, the tail's largest logit
  and three sums), in two all-reduces; the binary view, `log_prob` and `policy_loss` as K = 1;
- full view: 96 bytes a token (two logits, two largest ones, eight sums), in two all-reduces, and 24
  more in a third for a divergence that the moments do not settle (all but the two KL);
- the layout, with the first all-reduce of each view: 32 bytes a rank, 56 in the full view;
- a mask on a coarse view with `behavior_logits` alone takes their `log_prob` first;
- the backward pass: nothing.

A wrong shape is found before anything is exchanged, on the rank that has it.  Shards that do not
hold every column once, other columns for the behavior policy, and ids outside of the vocabulary
raise the same ValueError on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pdverify.backends.engine import NEG_INF, Engine, finite_or_zero
from pdverify.backends.losses import Evaluate
from pdverify.backends.losses import aggregate as aggregate
from pdverify.backends.masks import TorchBackend
from pdverify.backends.moments import FullMoments, TailMoments, lowered, merge_full
from pdverify.backends.shard_threads import in_threads
from pdverify.backends.shards import Shard as Shard
from pdverify.backends.torch_chunked import TorchChunked

F64 = torch.float64


class VocabParallel(Engine):
    """Sums over this rank's columns, then over the ranks.

    Args:
        inner: takes the sums of the local columns, which it must leave as they are; None is
            `TorchChunked`.
    """

    def __init__(self, inner: Engine | None = None) -> None:
        super().__init__()
        self.inner = inner or TorchChunked()
        self.from_moments = self.inner.from_moments

    def rows(self, logits: Any, lead: tuple[int, ...], name: str, size: int | None = None) -> Any:
        """See `Engine`; anything but a `Shard` is a TypeError."""
        if not isinstance(logits, Shard):
            raise TypeError(f"{name}: expected a Shard, got {type(logits).__name__}")
        return super().rows(logits, lead, name, size)

    def gather(self, logits: Shard, ids: Tensor) -> Tensor:
        """See `Engine`."""
        found = _met(logits, ids)
        if found is None:
            found = logits.communicator().total(logits.gather(ids))
            logits.met[:] = [(ids, found)]
        return found

    def tail(
        self, logits: Shard, ids: Tensor, excluded: Tensor, compute: torch.dtype
    ) -> TailMoments:
        """See `Engine`."""
        at, here = logits.places(ids)
        if logits.used:
            m = self.inner.tail(logits.columns, at, excluded & here, compute)
        else:
            m = TailMoments(*_nothing(ids, 4))
        (top,) = _agree([(m.top, m.s1)], [logits], ids)
        scale = torch.where(m.s1 == 0, 1.0, (m.top - top).exp())
        sums = [m.s1 * scale, m.s2 * scale**2, m.s3 * scale**3]
        return TailMoments(top, *_total(sums, [logits], ids))

    def full(
        self, logits: Shard, behavior: Shard, tokens: Tensor, compute: torch.dtype
    ) -> FullMoments:
        """See `Engine`."""
        if logits.used and logits.layout == behavior.layout:
            k, first, inside = _apart(logits, behavior, tokens)
            m = self.inner.full(logits.columns, behavior.columns, k, compute)
            m = merge_full(m, Engine().full(*first, inside, F64))
        else:  # `_agree` tells of shards that differ
            m = FullMoments(*_nothing(tokens, 10))
        ids = tokens[:, None]
        z, y = _agree([(m.top_z, m.s1), (m.top_y, m.m1)], [logits, behavior], ids)
        # sums without mass stay as they are: they are 0, or infinite whatever they are relative to
        down_z = torch.where(m.s1 == 0, 0.0, z - m.top_z)
        down_y = torch.where(m.m1 == 0, 0.0, y - m.top_y)
        s1, s2, s3, *others = _total(lowered(m, down_z, down_y), [logits, behavior], ids)
        return FullMoments(z, s1, s2, s3, y, *others)

    def cell_sums(
        self,
        logits: Shard,
        behavior: Shard,
        tokens: Tensor,
        norm: Tensor,
        behavior_norm: Tensor,
        name: str,
        compute: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Engine`."""
        sums = torch.zeros(3, len(tokens), dtype=F64, device=tokens.device)
        if logits.used:
            k, first, inside = _apart(logits, behavior, tokens)
            norms = norm, behavior_norm
            local = logits.columns, behavior.columns, k
            sums += torch.stack(self.inner.cell_sums(*local, *norms, name, compute))
            sums += torch.stack(Engine().cell_sums(*first, inside, *norms, name, F64))
        cells, h, weighted = logits.communicator().total(sums)
        return cells, h, weighted

    def log_prob(
        self, logits: Shard, tokens: Tensor, compute: torch.dtype, evaluate: Evaluate
    ) -> tuple[Tensor, ...]:
        """Log-prob of `tokens` `[T]` with its gradient to this rank's columns, and more.

        See `pdverify.backends.losses.log_prob`.
        """
        layout = logits.start, logits.size, logits.group
        log_pi, _, *others = _LogProb.apply(  # type: ignore[no-untyped-call]
            logits.logits, layout, tokens, self, compute, evaluate
        )
        return log_pi, *others

    def shard_gradient(
        self, shard: Shard, tokens: Tensor, log_pi: Tensor, norm: Tensor, grad: Tensor
    ) -> Tensor:
        """Gradient of `sum_t grad_t log pi_k` at the shard's logits, `[T, V_local]`.

        Args:
            shard: `T` rows.
            tokens: int64 `[T]`.
            log_pi: log-probs of the tokens, `[T]` nats.
            norm: float64 `[T, 2]`, as in `Engine`.
            grad: float32 or float64 `[T]`.
        """
        out = torch.empty_like(shard.logits)
        out[:, shard.used :] = 0.0
        if shard.used:
            for rows in self.blocks(shard.columns):
                some = shard.columns[rows], norm[rows], grad[rows]
                out[rows, : shard.used] = self.inner.softmax_gradient(*some)
            # 1 - pi_k through expm1: it cancels where k has nearly all of the mass
            at_k = torch.where(grad == 0, 0.0, -grad * torch.expm1(log_pi)).to(out.dtype)
            at, here = shard.places(tokens[:, None])
            out.scatter_(-1, at, torch.where(here, at_k[:, None], out.gather(-1, at)))
        return out


class _LogProb(torch.autograd.Function):
    """`log pi_k` of each row; between the passes it keeps its inputs and `[T]` numbers."""

    @staticmethod
    def forward(
        logits: Tensor,
        layout: tuple[int, int, Any],
        tokens: Tensor,
        engine: VocabParallel,
        compute: torch.dtype,
        evaluate: Evaluate,
    ) -> tuple[Tensor, ...]:
        log_pi, norm, *others = evaluate(Shard(logits, *layout))
        return log_pi.to(compute), norm, *others

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, ctx.layout, tokens, ctx.engine, _, _ = inputs
        ctx.save_for_backward(logits, tokens, *output[:2])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if grads[0] is None:
            return (None,) * 6
        saved = ctx.saved_tensors
        slope = _Gradient.apply(*saved, grads[0], ctx.layout, ctx.engine)  # type: ignore[no-untyped-call]
        return slope, *(None,) * 5


class _Gradient(torch.autograd.Function):
    """The gradient of `_LogProb`; apart, because it takes the log-normalizers as constants."""

    @staticmethod
    def forward(logits: Tensor, *arguments: Any) -> Tensor:
        *others, layout, engine = arguments
        gradient: Tensor = engine.shard_gradient(Shard(logits, *layout), *others)
        return gradient

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("vocab-parallel has first derivatives only")


def _nothing(like: Tensor, count: int) -> list[Tensor]:
    """Sums over no tokens."""
    return [torch.zeros(len(like), dtype=F64, device=like.device)] * count


def _met(shard: Shard, ids: Tensor) -> Tensor | None:
    """Logits at `ids` where other sums brought them."""
    for known, found in shard.met:
        if known.shape == ids.shape and torch.equal(known, ids):
            return found
    return None


def _apart(
    logits: Shard, behavior: Shard, tokens: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """`(k, pairs, ones)`: a local column to leave out, and a vocabulary of two to make up for it.

    Where the sampled token is another rank's, the first column is left out in its place.  It comes
    back from `pairs`: this column, or -inf where the sampled token is here, and the column of
    `ones`, which is left out again.
    """
    at, here = logits.places(tokens[:, None])
    first = [x.columns[:, :1].double().masked_fill(here, NEG_INF) for x in (logits, behavior)]
    z, y = (torch.nn.functional.pad(x, (0, 1), value=NEG_INF) for x in first)
    return at[:, 0], (z, y), torch.ones_like(tokens)


def _agree(
    tops: Sequence[tuple[Tensor, Tensor]], shards: Sequence[Shard], ids: Tensor
) -> list[Tensor]:
    """The ranks' largest logits, `[T]`, from `(largest, sum of weights)` here; 0 where none is.

    Raises:
        ValueError: the ranks do not share out the vocabulary, or ids lie outside of it.
    """
    comm = shards[0].communicator()
    table = ids.new_full((comm.size, 3 * len(shards) + 1), NEG_INF, dtype=F64)
    layouts = [x for shard in shards for x in shard.layout]
    table[comm.rank, :-1] = torch.tensor(layouts, dtype=F64)
    table[comm.rank, -1] = ((ids < 0) | (ids >= shards[0].size)).sum()
    here = [torch.where(weight == 0, NEG_INF, top) for top, weight in tops]
    found = comm.maximum(torch.cat([*here, table.flatten()]))
    columns = found[-table.numel() :].view(comm.size, -1).mT.long().tolist()
    _check_layout(*columns)
    return [finite_or_zero(x) for x in found[: -table.numel()].view(len(tops), -1)]


def _check_layout(start: list[int], stop: list[int], size: list[int], *more: list[int]) -> None:
    """Whether ranks hold every column once, and those of the behavior policy too; no bad ids."""

    def shown(start: list[int], stop: list[int]) -> str:
        return ", ".join(f"{a}:{b}" for a, b in zip(start, stop, strict=True))

    *behavior, outside = more
    if len(set(size)) > 1:
        raise ValueError(f"size: the ranks have {size}, expected one vocabulary size")
    ends = sorted((a, b) for a, b in zip(start, stop, strict=True) if a < b)
    if [a for a, _ in ends] + [size[0]] != [0] + [b for _, b in ends]:
        raise ValueError(
            f"logits: the ranks hold columns {shown(start, stop)}, "
            f"expected each of {size[0]} columns once"
        )
    if behavior and behavior[:2] != [start, stop]:
        raise ValueError(
            f"behavior_logits: the ranks hold columns {shown(*behavior[:2])}, "
            f"expected those of logits, {shown(start, stop)}"
        )
    if any(outside):
        raise ValueError(f"tokens or topk_ids: outside of a vocabulary of {size[0]}")


def _total(sums: Sequence[Tensor], shards: Sequence[Shard], ids: Tensor) -> list[Tensor]:
    """Sums `[T]` over the ranks; the shards come to know their logits at `ids`."""
    asked = [shard for shard in shards if _met(shard, ids) is None]
    local = [*sums, *(z for shard in asked for z in shard.gather(ids).unbind(-1))]
    found = shards[0].communicator().total(torch.stack(local))
    for number, shard in enumerate(asked):
        start = len(sums) + number * ids.shape[1]
        shard.met[:] = [(ids, found[start : start + ids.shape[1]].mT)]
    return list(found[: len(sums)])


_backend = TorchBackend(VocabParallel())
divergence = _backend.divergence
coefficient = _backend.coefficient
keep_mask = _backend.keep_mask
predictive_mask = _backend.predictive_mask
log_prob = _backend.log_prob
policy_loss = _backend.policy_loss
predictive_policy_loss = _backend.predictive_policy_loss
in_process = in_threads(_backend)
