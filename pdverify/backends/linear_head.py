"""Trust-region masks from hidden states and a language-model head: ``linear-head``.

Must agree with `pdverify.definitions` on the logits that the head makes, which are never held: a
tile of tokens and columns is multiplied out, summed, and forgotten::

    from pdverify.backends.linear_head import LinearHead, predictive_policy_loss

    loss = predictive_policy_loss(LinearHead(hidden, weight), tokens, advantages, ...)

The functions are those of `pdverify.backends.masks.TorchBackend`, with a `LinearHead` where they
take `logits`; `behavior_logits` may be one too, or a tensor `[B, L, V]`.  Gradients reach `hidden`,
`weight` and `bias`.  Products accumulate and stay in float32 (in float64 with `compute_dtype`
float64 or float64 operands): an operand of fewer bits is widened, a product never rounded to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from pdverify.backends.engine import NEG_INF, Engine, finite_or_zero
from pdverify.backends.head_logits import LinearHead as LinearHead
from pdverify.backends.head_logits import Source, Tiles, local, slices, tile_dtype, used
from pdverify.backends.losses import Evaluate
from pdverify.backends.losses import aggregate as aggregate
from pdverify.backends.masks import TorchBackend
from pdverify.backends.moments import FullMoments, TailMoments, merge_full, merge_tails
from pdverify.backends.torch_chunked import TorchChunked

CPU_TILE = (2048, 1008)
"""Tokens and columns multiplied out at once on a CPU: the tile stays in its last-level cache."""

DEVICE_TILE = (4096, 4080)
"""Tokens and columns multiplied out at once elsewhere."""

GATHERED = 2**19
"""Numbers in the head's rows that are looked up at once for single logits."""

Sums: TypeAlias = tuple[Tensor, ...]
Found = TypeVar("Found", Sums, TailMoments, FullMoments)


class TileSums(TorchChunked):
    """Sums of one of `Tiles`, in the place of its logits where that saves."""

    def tail(
        self, logits: Tensor, ids: Tensor, excluded: Tensor, compute: torch.dtype
    ) -> TailMoments:
        """See `Engine`; the logits do not survive it."""
        count, size = logits.shape
        logits.scatter_(-1, torch.where(excluded, ids, size - 1), NEG_INF)
        found = torch.empty(4, count, dtype=compute, device=logits.device)
        step = max(1, Engine.usual_block(self, logits.device) // size)
        power = torch.empty(min(step, count), size, dtype=compute, device=logits.device)
        for rows in slices(count, step):
            z, square = logits[rows].to(compute), power[: rows.stop - rows.start]
            top, s1, s2, s3 = found[:, rows]
            top.copy_(finite_or_zero(z.amax(-1)))
            torch.sum(z.sub_(top[:, None]).exp_(), -1, out=s1)
            torch.sum(torch.mul(z, z, out=square), -1, out=s2)
            torch.sum(square.mul_(z), -1, out=s3)
        return TailMoments(*found.double())


class LinearHeadEngine(Engine):
    """Sums over the vocabulary, a tile of tokens and columns at a time, merged as they come.

    Args:
        tokens, columns: size of a tile; None chooses by device.
        epilogue: takes the sums of a tile, and may write over it; None is `TileSums`.  Where
            there is a C++ compiler, `pdverify.backends.native.NativeEngine()` does it in one call.
    """

    def __init__(
        self,
        tokens: int | None = None,
        columns: int | None = None,
        epilogue: Engine | None = None,
    ) -> None:
        super().__init__()
        self.tokens, self.columns, self.epilogue = tokens, columns, epilogue or TileSums()

    def _steps(self, device: torch.device) -> tuple[int, int]:
        tokens, columns = CPU_TILE if device.type == "cpu" else DEVICE_TILE
        return self.tokens or tokens, self.columns or columns

    def _sweep(
        self,
        sources: Sequence[Source],
        ids: Tensor,
        compute: torch.dtype,
        take: Callable[[slice, Sequence[Tensor], Tensor], Found],
        merge: Callable[[Found, Found], Found],
        fields: int,
    ) -> Sums:
        """`take(rows, tiles, local ids)` of every tile, merged over each row; ids are `[T, M]`."""
        if not len(ids):
            return (ids.new_empty(0, dtype=torch.float64),) * fields
        _check_ids(ids, sources[0])
        tokens, columns = self._steps(ids.device)
        size = max(used(source) for source in sources)
        dtypes = [tile_dtype(source, compute) for source in sources]
        shape = min(tokens, len(ids)), min(columns, size)
        buffers = [Tiles.buffer(*shape, dtype, ids.device) for dtype in dtypes]
        at_ids = [ids.new_full(ids.shape, NEG_INF, dtype=torch.float64) for _ in sources]
        parts = []
        for rows in slices(len(ids), tokens):
            some = [Tiles(s, rows, dtype) for s, dtype in zip(sources, dtypes, strict=True)]
            total: Found | None = None
            for chunk in slices(size, columns):
                tiles = [s.make(chunk, out) for s, out in zip(some, buffers, strict=True)]
                inside = local(ids[rows], chunk)
                for z, found in zip(tiles, at_ids, strict=True):
                    found[rows] = torch.maximum(found[rows], z.gather(-1, inside))
                sums = take(rows, tiles, inside)
                total = sums if total is None else merge(total, sums)
            assert total is not None
            parts.append(total if isinstance(total, tuple) else tuple(vars(total).values()))
        for source, found in zip(sources, at_ids, strict=True):
            if isinstance(source, LinearHead):
                source.met[:] = [(ids, found)]
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def gather(self, logits: Source, ids: Tensor) -> Tensor:
        """See `Engine`."""
        if isinstance(logits, Tensor):
            return super().gather(logits, ids)
        if logits.met:
            known, z = logits.met.pop()
            if known.shape == ids.shape and torch.equal(known, ids):
                return z
        _check_ids(ids, logits)
        found = torch.empty(ids.shape, dtype=torch.float64, device=ids.device)
        step = max(1, GATHERED // (ids.shape[1] * logits.weight.shape[1]))
        for rows in slices(len(ids), step):
            some = ids[rows].clamp_max(logits.used - 1)
            weight, hidden = logits.weight[some].double(), logits.hidden[rows, :, None].double()
            found[rows] = torch.bmm(weight, hidden)[..., 0]
            logits.finish(found[rows], None if logits.bias is None else logits.bias[some])
        return found.masked_fill_(ids >= logits.used, NEG_INF)

    def tail(
        self, logits: Source, ids: Tensor, excluded: Tensor, compute: torch.dtype
    ) -> TailMoments:
        """See `Engine`."""

        def take(rows: slice, tiles: Sequence[Tensor], ids: Tensor) -> TailMoments:
            return self.epilogue.tail(tiles[0], ids, excluded[rows], compute)

        return TailMoments(*self._sweep([logits], ids, compute, take, merge_tails, 4))

    def full(
        self, logits: Source, behavior: Source, tokens: Tensor, compute: torch.dtype
    ) -> FullMoments:
        """See `Engine`."""

        def take(rows: slice, tiles: Sequence[Tensor], k: Tensor) -> FullMoments:
            return self.epilogue.full(tiles[0], tiles[1], k[:, 0], compute)

        both = logits, behavior
        return FullMoments(*self._sweep(both, tokens[:, None], compute, take, merge_full, 10))

    def cell_sums(
        self,
        logits: Source,
        behavior: Source,
        tokens: Tensor,
        norm: Tensor,
        behavior_norm: Tensor,
        name: str,
        compute: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Engine`."""

        def take(rows: slice, tiles: Sequence[Tensor], k: Tensor) -> Sums:
            norms = norm[rows], behavior_norm[rows]
            return self.epilogue.cell_sums(tiles[0], tiles[1], k[:, 0], *norms, name, compute)

        def merge(a: Sums, b: Sums) -> Sums:
            return tuple(x + y for x, y in zip(a, b, strict=True))

        both = logits, behavior
        cells, h, weighted = self._sweep(both, tokens[:, None], compute, take, merge, 3)
        return cells, h, weighted

    def log_prob(
        self, logits: LinearHead, tokens: Tensor, compute: torch.dtype, evaluate: Evaluate
    ) -> tuple[Tensor, ...]:
        """Log-prob of `tokens` `[T]` with its gradient to the head's tensors, and more.

        See `pdverify.backends.losses.log_prob`.
        """
        form = logits.softcap, logits.temperature, logits.vocab_size
        log_pi, _, *others = _LogProb.apply(  # type: ignore[no-untyped-call]
            logits.hidden, logits.weight, logits.bias, form, tokens, self, compute, evaluate
        )
        return log_pi, *others

    def head_gradient(
        self, head: LinearHead, tokens: Tensor, log_pi: Tensor, norm: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradient of `sum_t grad_t log pi_k` at hidden states, weight and bias, in their dtypes.

        Summed in the dtype of the products.  A row with `grad_t = 0` takes no part, whatever its
        hidden states hold.

        Args:
            head: `T` rows.
            tokens: int64 `[T]`.
            log_pi: log-probs of the tokens, `[T]` nats.
            norm: float64 `[T, 2]`, as in `Engine`.
            grad: float32 or float64 `[T]`.
        """
        dtype, device = head.dtype_of(grad.dtype), grad.device
        active = grad.nonzero()[:, 0]
        tokens, log_pi, norm, grad = (x[active] for x in (tokens, log_pi, norm, grad))
        # 1 - pi_k through expm1: it cancels where k has nearly all of the mass
        at_k = (-grad * torch.expm1(log_pi)).to(dtype)[:, None]
        anchor, rest = norm.to(dtype)[:, None].unbind(-1)
        scale = -grad.to(dtype)[:, None]
        step, columns = self._steps(device)
        out = Tiles.buffer(min(step, len(active)), min(columns, head.used), dtype, device)
        d_active = torch.zeros(len(active), head.weight.shape[1], dtype=dtype, device=device)
        d_weight = torch.zeros_like(head.weight)
        d_bias = None if head.bias is None else torch.zeros_like(head.bias)
        for chunk in slices(head.used, columns):
            weight = head.weight[chunk].to(dtype)
            sums, bias_sums = torch.zeros_like(weight), torch.zeros_like(weight[:, 0])
            for rows in slices(len(active), step):
                tiles = Tiles(head, active[rows], dtype)
                z = tiles.make(chunk, out)
                slope = head.slope(z[:, : len(weight)])
                z.sub_(anchor[rows]).sub_(rest[rows]).exp_().mul_(scale[rows])
                z.scatter_(-1, local(tokens[rows, None], chunk), at_k[rows])
                grad_z = z[:, : len(weight)].mul_(slope)
                d_active[rows].addmm_(grad_z, weight)
                sums.addmm_(grad_z.mT, tiles.rows.to(dtype))
                if d_bias is not None:
                    bias_sums.add_(grad_z.sum(0))
            d_weight[chunk] = sums
            if d_bias is not None:
                d_bias[chunk] = bias_sums
        d_hidden = torch.zeros_like(head.hidden)
        d_hidden[active] = d_active.to(d_hidden.dtype)
        return d_hidden, d_weight, d_bias


class _LogProb(torch.autograd.Function):
    """`log pi_k` of each row; between the passes it keeps its inputs and `[T]` numbers."""

    @staticmethod
    def forward(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        form: tuple[float | None, float, int | None],
        tokens: Tensor,
        engine: LinearHeadEngine,
        compute: torch.dtype,
        evaluate: Evaluate,
    ) -> tuple[Tensor, ...]:
        log_pi, norm, *others = evaluate(LinearHead(hidden, weight, bias, *form))
        return log_pi.to(compute), norm, *others

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        hidden, weight, bias, ctx.form, tokens, ctx.engine, _, _ = inputs
        ctx.save_for_backward(hidden, weight, bias, tokens, *output[:2])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if grads[0] is None:
            return (None,) * 8
        saved = ctx.saved_tensors
        slopes = _Gradient.apply(*saved, grads[0], ctx.form, ctx.engine)  # type: ignore[no-untyped-call]
        return *slopes, *(None,) * 5


class _Gradient(torch.autograd.Function):
    """The gradient of `_LogProb`; apart, because writing into buffers cannot be differentiated."""

    @staticmethod
    def forward(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        log_pi: Tensor,
        norm: Tensor,
        grad: Tensor,
        form: tuple[float | None, float, int | None],
        engine: LinearHeadEngine,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        head = LinearHead(hidden, weight, bias, *form)
        return engine.head_gradient(head, tokens, log_pi, norm, grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise NotImplementedError("linear-head has first derivatives only")


def _check_ids(ids: Tensor, source: Source) -> None:
    if ids.numel():
        low, high = (int(x) for x in ids.aminmax())
        if low < 0 or high >= source.shape[-1]:
            raise IndexError(f"ids = {low} to {high}: must be 0 to {source.shape[-1] - 1}")


_backend = TorchBackend(LinearHeadEngine())
divergence = _backend.divergence
coefficient = _backend.coefficient
keep_mask = _backend.keep_mask
predictive_mask = _backend.predictive_mask
log_prob = _backend.log_prob
policy_loss = _backend.policy_loss
predictive_policy_loss = _backend.predictive_policy_loss
