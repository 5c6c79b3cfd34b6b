"""Sums over a vocabulary in Triton kernels: the engine of ``triton``.

Must agree with `pdverify.definitions`.  One program reads one row, tile by tile; every lane (a
thread) sums its own tokens relative to the largest logit it has met, in the compute dtype inside
a tile and in float64 across tiles, and the lanes are joined once, at the end of the row.  Logits
may be bf16, fp16, fp32, fp64, fp8 e5m2 or (from compute capability 8.9 on) fp8 e4m3fn, and are
converted exactly.  Nothing of the size of the logits is written but their gradient.

With ``TRITON_INTERPRET=1`` in the environment before triton is first imported, the same kernels run
on the CPU, slowly.  `pdverify.backends.triton_backend` says whether they can run;
``python -m pdverify.backends.triton_report`` compiles them without a GPU.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdverify.backends.engine import Engine
from pdverify.backends.losses import aggregate as aggregate
from pdverify.backends.masks import TorchBackend
from pdverify.backends.moments import FullMoments, TailMoments

NEG_INF = tl.constexpr(float("-inf"))
LOWEST = tl.constexpr(-1e38)
LOG2E = tl.constexpr(math.log2(math.e))
INVERSE_FACTORIALS = tl.constexpr(tuple(1 / math.factorial(n) for n in range(17)))
NO_ID = 2**31 - 1
WARP = 32
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
REAL = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit
def _columns(RUNS: tl.constexpr, E: tl.constexpr):
    """Columns of a tile, `[RUNS, E]`: runs of E adjacent ones."""
    return tl.arange(0, RUNS)[:, None] * E + tl.arange(0, E)[None, :]


@triton.jit
def _real(x, REAL: tl.constexpr):
    """Exactly, by way of float32: fp8 has no road to float64 in the interpreter."""
    if x.dtype.primitive_bitwidth < 32:
        x = x.to(tl.float32)
    return x.to(REAL)


@triton.jit
def _read(row, stride, at, end, V, REAL: tl.constexpr):
    """Logits at columns `at`, all below `end`; -inf beyond the vocabulary."""
    # no filler of tl.load's own: fp8 e4m3 has no infinity
    x = _real(tl.load(row + at.to(tl.int64) * stride, mask=at < V, other=0.0), REAL)
    if end > V:
        x = tl.where(at < V, x, NEG_INF)
    return x


@triton.jit
def _without(x, at, start, end, k):
    """The same with -inf at column k."""
    if (start <= k) & (k < end):
        x = tl.where(at == k, NEG_INF, x)
    return x


@triton.jit
def _exp(x):
    # in float32 the hardware's own, without detours for subnormal results
    return tl.exp2(x * LOG2E) if x.dtype == tl.float32 else tl.exp(x)


@triton.jit
def _or_zero(top):
    """A largest logit to subtract: 0 where there is none."""
    return tl.where(top == NEG_INF, 0.0, top)


@triton.jit
def _rise(top, higher):
    """How far `higher` lies above `top`; 0 for a lane without tokens."""
    return tl.where(top == NEG_INF, 0.0, higher - top)


@triton.jit
def _lane_max(x):
    return tl.max(tl.max(x, 2), 0)


@triton.jit
def _lane_sum(x):
    return tl.sum(tl.sum(x, 2), 0).to(tl.float64)


@triton.jit
def _times(mass, factor):
    """`mass * factor` with `0 * inf = 0`."""
    return tl.where(mass == 0, 0.0, mass * factor)


@triton.jit
def _tail_kernel(
    out,
    z,
    ids,
    ids_row,
    z_row,
    z_col,
    T,
    V,
    J: tl.constexpr,
    LANES: tl.constexpr,
    E: tl.constexpr,
    REAL: tl.constexpr,
) -> None:
    """`TailMoments` of a row; `ids` are ascending and end with `NO_ID`."""
    row = tl.program_id(0).to(tl.int64)
    z += row * z_row
    ids += row * ids_row
    columns = _columns(J * LANES, E)
    top = tl.full([LANES], NEG_INF, REAL)
    s1 = tl.zeros([LANES], tl.float64)
    s2 = tl.zeros([LANES], tl.float64)
    s3 = tl.zeros([LANES], tl.float64)
    hidden = tl.load(ids)
    for start in range(0, V, J * LANES * E):
        end = start + J * LANES * E
        at = start + columns
        x = _read(z, z_col, at, end, V, REAL)
        while hidden < end:
            x = tl.where(at == hidden, NEG_INF, x)
            ids += 1
            hidden = tl.load(ids)
        x = tl.reshape(x, [J, LANES, E])
        higher = tl.maximum(top, _lane_max(x))
        w = _exp(x - _or_zero(higher)[None, :, None])
        fall = _exp(-_rise(top, higher)).to(tl.float64)
        s1 = s1 * fall + _lane_sum(w)
        s2 = s2 * (fall * fall) + _lane_sum(w * w)
        s3 = s3 * (fall * fall * fall) + _lane_sum(w * w * w)
        top = higher
    peak = tl.max(top, 0)
    fall = _exp(-_rise(top, peak).to(tl.float64))
    out += row
    tl.store(out, _or_zero(peak))
    tl.store(out + T, tl.sum(s1 * fall, 0))
    tl.store(out + 2 * T, tl.sum(s2 * (fall * fall), 0))
    tl.store(out + 3 * T, tl.sum(s3 * (fall * fall * fall), 0))


@triton.jit
def _lowered(s1, s2, s3, m1, x, f, e1, e2, down_z, down_y):
    """Sums relative to tops that are higher by `down`; as `merge_full` has them."""
    rz, ry = _exp(-down_z).to(tl.float64), _exp(-down_y).to(tl.float64)
    shift = (down_y - down_z).to(tl.float64)
    return (
        s1 * rz,
        s2 * (rz * rz),
        s3 * (rz * rz * rz),
        m1 * ry,
        x * (rz * ry),
        _times(ry, f + shift * m1),
        _times(rz, e1 + shift * s1),
        _times(rz * rz, e2 + shift * s2),
    )


@triton.jit
def _full_sums(
    z,
    y,
    z_col,
    y_col,
    k,
    V,
    WIDE: tl.constexpr,
    J: tl.constexpr,
    LANES: tl.constexpr,
    E: tl.constexpr,
    REAL: tl.constexpr,
):
    """`FullMoments` of a row.  WIDE also takes products and the sums of a tile in float64.

    Without it e1, e2 or f may come out NaN where logits are -inf.
    """
    columns = _columns(J * LANES, E)
    top_z = tl.full([LANES], NEG_INF, REAL)
    top_y = tl.full([LANES], NEG_INF, REAL)
    s1 = tl.zeros([LANES], tl.float64)
    s2 = tl.zeros([LANES], tl.float64)
    s3 = tl.zeros([LANES], tl.float64)
    m1 = tl.zeros([LANES], tl.float64)
    x = tl.zeros([LANES], tl.float64)
    f = tl.zeros([LANES], tl.float64)
    e1 = tl.zeros([LANES], tl.float64)
    e2 = tl.zeros([LANES], tl.float64)
    for start in range(0, V, J * LANES * E):
        end = start + J * LANES * E
        at = start + columns
        a = _without(_read(z, z_col, at, end, V, REAL), at, start, end, k)
        a = tl.reshape(a, [J, LANES, E])
        b = _without(_read(y, y_col, at, end, V, REAL), at, start, end, k)
        b = tl.reshape(b, [J, LANES, E])
        high_z, high_y = tl.maximum(top_z, _lane_max(a)), tl.maximum(top_y, _lane_max(b))
        s1, s2, s3, m1, x, f, e1, e2 = _lowered(
            s1, s2, s3, m1, x, f, e1, e2, _rise(top_z, high_z), _rise(top_y, high_y)
        )
        top_z, top_y = high_z, high_y
        a -= _or_zero(top_z)[None, :, None]
        b -= _or_zero(top_y)[None, :, None]
        d, p, q = a - b, _exp(a), _exp(b)
        if WIDE:
            d, p, q = d.to(tl.float64), p.to(tl.float64), q.to(tl.float64)
            pd, qd = _times(p, d), _times(q, d)
        else:
            # finite where the mass is 0, as is d of two -inf
            pd, qd = p * tl.maximum(d, LOWEST), q * tl.minimum(d, -LOWEST)
        s1 += _lane_sum(p)
        s2 += _lane_sum(p * p)
        s3 += _lane_sum(p * p * p)
        m1 += _lane_sum(q)
        x += _lane_sum(p * q)
        f += _lane_sum(qd)
        e1 += _lane_sum(pd)
        e2 += _lane_sum(p * pd)
    peak_z, peak_y = tl.max(top_z, 0), tl.max(top_y, 0)
    down_z, down_y = _rise(top_z, peak_z).to(tl.float64), _rise(top_y, peak_y).to(tl.float64)
    s1, s2, s3, m1, x, f, e1, e2 = _lowered(s1, s2, s3, m1, x, f, e1, e2, down_z, down_y)
    peak_z, peak_y = _or_zero(peak_z).to(tl.float64), _or_zero(peak_y).to(tl.float64)
    s1, s2, s3, m1 = tl.sum(s1, 0), tl.sum(s2, 0), tl.sum(s3, 0), tl.sum(m1, 0)
    x, f, e1, e2 = tl.sum(x, 0), tl.sum(f, 0), tl.sum(e1, 0), tl.sum(e2, 0)
    return peak_z, s1, s2, s3, peak_y, m1, x, f, e1, e2


@triton.jit
def _narrow_enough(z_k, top, s1, s2, s3, f, e1, e2):
    """Whether sums of tiles in float32 serve: no NaN, and C does not cancel.

    The weights of the moments h in C are `w_i = pi_i + pi_k eps - q`.  Where they nearly vanish on
    all of the mass, because it lies on one token other than k or on equal ones, C is far smaller
    than the terms of `s1 - m1`, whose rounding then shows.
    """
    anchor = tl.maximum(z_k, top)
    r, pi_k = _exp(top - anchor), _exp(z_k - anchor)
    total = pi_k + r * s1
    r, pi_k = r / total, pi_k / total
    eps, q, cubes = r * s1, r * r * s2, r * r * r * s3
    shift = pi_k * eps - q
    return (cubes + 2 * shift * q + shift * shift * eps >= q * q / 16) & (
        f + e1 + e2 == f + e1 + e2
    )


@triton.jit
def _full_kernel(
    out,
    z,
    y,
    tokens,
    z_row,
    z_col,
    y_row,
    y_col,
    T,
    V,
    J: tl.constexpr,
    LANES: tl.constexpr,
    E: tl.constexpr,
    REAL: tl.constexpr,
) -> None:
    """`FullMoments` of a row; the few rows that need wide sums are read twice."""
    row = tl.program_id(0).to(tl.int64)
    z += row * z_row
    y += row * y_row
    k = tl.load(tokens + row)
    WIDE: tl.constexpr = tl.float64 == REAL
    peak_z, s1, s2, s3, peak_y, m1, x, f, e1, e2 = _full_sums(
        z, y, z_col, y_col, k.to(tl.int32), V, WIDE, J, LANES, E, REAL
    )
    if not WIDE:
        FEW: tl.constexpr = 4 if E > 4 else E  # columns of a thread: they fit in the registers
        z_k = _real(tl.load(z + k * z_col), REAL).to(tl.float64)
        if not _narrow_enough(z_k, peak_z, s1, s2, s3, f, e1, e2):
            peak_z, s1, s2, s3, peak_y, m1, x, f, e1, e2 = _full_sums(
                z, y, z_col, y_col, k.to(tl.int32), V, True, 1, LANES, FEW, REAL
            )
    out += row
    tl.store(out, peak_z)
    tl.store(out + T, s1)
    tl.store(out + 2 * T, s2)
    tl.store(out + 3 * T, s3)
    tl.store(out + 4 * T, peak_y)
    tl.store(out + 5 * T, m1)
    tl.store(out + 6 * T, x)
    tl.store(out + 7 * T, f)
    tl.store(out + 8 * T, e1)
    tl.store(out + 9 * T, e2)


@triton.jit
def _expm1_below(x):
    """`e^-x` and `e^-x - 1`, x >= 0."""
    TERMS: tl.constexpr = 16 if x.dtype == tl.float64 else 8
    power, series = _exp(-x), 0.0
    for n in tl.static_range(TERMS, 0, -1):
        series = INVERSE_FACTORIALS[n] - x * series
    return power, tl.where(x < 0.5, -x * series, power - 1.0)


@triton.jit
def _log1p(x):
    """`log(1 + x)`, x >= 0: `2 atanh(x / (2 + x))` where it is small."""
    TERMS: tl.constexpr = 12 if x.dtype == tl.float64 else 5
    s, series = x / (2.0 + x), 0.0
    for n in tl.static_range(TERMS - 1, -1, -1):
        series = 2.0 / (2 * n + 1) + s * s * series
    return tl.where(x < 0.5, s * series, tl.log(1.0 + x))


@triton.jit
def _cell(mu, pi, gap, NAME: tl.constexpr):
    """A divergence's `(cell, h)`, as `STABLE` has them, all from `w = e^(-|gap|/2) - 1`."""
    if NAME == "jensen-shannon":  # where either mass is still visible
        gap = tl.minimum(tl.maximum(gap, -80.0), 80.0)
    up = gap > 0
    root, w = _expm1_below(tl.abs(gap) / 2)
    larger = tl.where(up, pi, mu)
    change = tl.where(up, larger, -larger) * (-w * (2.0 + w))  # pi - mu
    if NAME == "kl":
        cell, h = change - _times(mu, gap), change
    elif NAME == "reverse-kl":
        h = _times(pi, gap)
        cell = h - change
    elif NAME == "tv":
        cell, h = tl.abs(change) / 2, tl.where(up, pi, tl.where(gap < 0, -pi, 0.0)) / 2
    elif NAME == "jensen-shannon":
        log_cosh = _log1p(w * w / (2.0 * root))
        cell = (change * gap / 2 - (pi + mu) * log_cosh) / 2
        h = pi * (gap / 2 - log_cosh) / 2
    elif NAME == "squared-hellinger":
        cell, h = larger * w * w / 2, tl.where(up, -pi * w, mu * root * w) / 2
    else:
        tl.static_assert(NAME == "chi2" or NAME == "reverse-chi2")
        # e^(|gap|/2) where the smaller mass divides; in two factors: overflows only if it must
        one_way: tl.constexpr = NAME == "chi2"
        divides_smaller = (gap < 0) == one_way
        stretch = tl.where(divides_smaller, 1.0 / root, 1.0) * (w * (2.0 + w))
        cell = _times(larger, stretch) * stretch
        factor = tl.where(divides_smaller, 1.0 / root, root)
        scaled = tl.where(change == 0, 0.0, change * factor * factor)
        h = change + scaled if one_way else 2.0 * scaled
    return cell, h


@triton.jit
def _cells_kernel(
    out,
    z,
    y,
    tokens,
    norm_z,
    norm_y,
    z_row,
    z_col,
    y_row,
    y_col,
    T,
    V,
    NAME: tl.constexpr,
    J: tl.constexpr,
    LANES: tl.constexpr,
    E: tl.constexpr,
    REAL: tl.constexpr,
) -> None:
    """Sums of `cell`, `h` and `h pi` of a row, its log-normalizers known."""
    row = tl.program_id(0).to(tl.int64)
    z += row * z_row
    y += row * y_row
    k = tl.load(tokens + row).to(tl.int32)
    top_z, rest_z = tl.load(norm_z + 2 * row).to(REAL), tl.load(norm_z + 2 * row + 1)
    top_y, rest_y = tl.load(norm_y + 2 * row).to(REAL), tl.load(norm_y + 2 * row + 1)
    shift = (rest_z - rest_y).to(REAL)
    rest_z, rest_y = rest_z.to(REAL), rest_y.to(REAL)
    columns = _columns(J * LANES, E)
    cells = tl.zeros([LANES], tl.float64)
    moments = tl.zeros([LANES], tl.float64)
    weighted = tl.zeros([LANES], tl.float64)
    for start in range(0, V, J * LANES * E):
        end = start + J * LANES * E
        at = start + columns
        a = _without(_read(z, z_col, at, end, V, REAL), at, start, end, k)
        a = tl.reshape(a, [J, LANES, E]) - top_z
        b = _without(_read(y, y_col, at, end, V, REAL), at, start, end, k)
        b = tl.reshape(b, [J, LANES, E]) - top_y
        # differences of logits first: exact where the two policies are close
        gap = tl.where(tl.maximum(a, b) == NEG_INF, 0.0, (a - b) - shift)
        pi = _exp(a - rest_z)
        cell, h = _cell(_exp(b - rest_y), pi, gap, NAME)
        cells += _lane_sum(cell)
        moments += _lane_sum(h)
        weighted += _lane_sum(_times(pi, h))
    out += row
    tl.store(out, tl.sum(cells, 0))
    tl.store(out + T, tl.sum(moments, 0))
    tl.store(out + 2 * T, tl.sum(weighted, 0))


@triton.jit
def _gradient_kernel(
    out,
    z,
    norm,
    grad,
    out_row,
    out_col,
    z_row,
    z_col,
    T,
    V,
    J: tl.constexpr,
    LANES: tl.constexpr,
    E: tl.constexpr,
    REAL: tl.constexpr,
) -> None:
    """`-grad pi_i` of a row; logits of a row with `grad = 0` are not even read."""
    row = tl.program_id(0).to(tl.int64)
    z += row * z_row
    out += row * out_row
    top, rest = tl.load(norm + 2 * row).to(REAL), tl.load(norm + 2 * row + 1).to(REAL)
    scale = tl.load(grad + row)
    reach = tl.where(scale == 0, 0, V)
    columns = _columns(J * LANES, E)
    for start in range(0, V, J * LANES * E):
        at = start + columns
        x = _real(tl.load(z + at.to(tl.int64) * z_col, mask=at < reach, other=0.0), REAL)
        slope = tl.where(scale == 0, 0.0, -scale * _exp((x - top) - rest))
        if out.dtype.element_ty.primitive_bitwidth < 32:
            slope = slope.to(tl.float32)  # no shorter way from float64
        tl.store(out + at.to(tl.int64) * out_col, slope.to(out.dtype.element_ty), mask=at < V)


def tile(
    kernel: Any,
    size: int,
    itemsize: int,
    compute: torch.dtype,
    values: int | None = None,
    warps: int | None = None,
) -> dict[str, int]:
    """How a kernel cuts a row of `size` logits: tiles of `J * LANES * E` columns.

    Args:
        itemsize: bytes of a logit where every row starts at a multiple of 16 logits and of 16
            bytes: a thread then loads 16 bytes at once.  Else 16: one logit at a time.
        values: columns of a thread in a tile, `J * E`; None chooses what registers have room for.
        warps: per program; None chooses by `size`.  `LANES` is 32 of each.
    """
    usual = 32 if kernel is _tail_kernel else 16
    values = values or (usual if compute == torch.float32 else usual // 2)
    warps = warps or max(1, min(4, triton.next_power_of_2(size // (WARP * values))))
    vector = min(16 // itemsize, values)
    return {"J": values // vector, "LANES": WARP * warps, "E": vector, "num_warps": warps}


class TritonEngine(Engine):
    """Sums over the vocabulary in Triton kernels, one program a row.

    Args:
        values, warps: powers of 2 in place of what `tile` chooses.
    """

    def __init__(self, values: int | None = None, warps: int | None = None) -> None:
        super().__init__()
        self.values, self.warps = values, warps

    def _launch(
        self,
        kernel: Any,
        arguments: tuple[Any, ...],
        matrices: tuple[Tensor, ...],
        compute: torch.dtype,
        **constants: str,
    ) -> None:
        """One program for each row of `matrices`, all `[T, V]`: arguments, strides, T, V."""
        rows, size = matrices[0].shape
        whole = all(  # what Triton knows to be aligned; else neighbors go to neighboring threads
            x.stride(1) == 1 and n % 16 == 0
            for x in matrices
            for n in (size, x.stride(0), x.data_ptr())
        )
        itemsize = max(x.element_size() for x in matrices) if whole else 16
        strides = (n for x in matrices for n in x.stride())
        with torch.cuda.device_of(matrices[0]):
            kernel[(rows,)](
                *arguments,
                *strides,
                rows,
                size,
                **constants,
                **tile(kernel, size, itemsize, compute, self.values, self.warps),
                REAL=REAL[compute],
                enable_fp_fusion=True,
            )

    def gather(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Logits at `ids` `[T, M]`, float64."""
        bits = BITS[logits.element_size()]  # torch cannot gather fp8
        return logits.view(bits).gather(-1, ids).view(logits.dtype).double()

    def tail(
        self, logits: Tensor, ids: Tensor, excluded: Tensor, compute: torch.dtype
    ) -> TailMoments:
        """Moments of the tokens outside a set; see `Engine`."""
        ids = torch.where(excluded, ids, NO_ID).int()
        ids = torch.nn.functional.pad(ids, (0, 1), value=NO_ID).sort(-1).values
        out = _empty(4, logits)
        self._launch(_tail_kernel, (out, logits, ids, ids.shape[1]), (logits,), compute)
        return TailMoments(*out)

    def full(
        self, logits: Tensor, behavior: Tensor, tokens: Tensor, compute: torch.dtype
    ) -> FullMoments:
        """Moments of both policies over the vocabulary without `tokens`; see `Engine`."""
        out = _empty(10, logits)
        both = (logits, behavior)
        self._launch(_full_kernel, (out, *both, tokens), both, compute)
        return FullMoments(*out)

    def cell_sums(
        self,
        logits: Tensor,
        behavior: Tensor,
        tokens: Tensor,
        norm: Tensor,
        behavior_norm: Tensor,
        name: str,
        compute: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sums of a divergence's cells, of its moments h, and of `h pi`; see `Engine`."""
        out = _empty(3, logits)
        both = (logits, behavior)
        arguments = (out, *both, tokens, norm.contiguous(), behavior_norm.contiguous())
        self._launch(_cells_kernel, arguments, both, compute, NAME=name)
        cells, moments, weighted = out
        return cells, moments, weighted

    def softmax_gradient(self, logits: Tensor, norm: Tensor, grad: Tensor) -> Tensor:
        """`-grad_t pi_i`, `[T, V]` in the logits' dtype; see `Engine`."""
        out = torch.empty_like(logits)
        arguments = (out, logits, norm.contiguous(), grad.contiguous())
        self._launch(_gradient_kernel, arguments, (out, logits), grad.dtype)
        return out


def _empty(count: int, logits: Tensor) -> Tensor:
    return torch.empty(count, len(logits), dtype=torch.float64, device=logits.device)


_backend = TorchBackend(TritonEngine())
divergence = _backend.divergence
coefficient = _backend.coefficient
keep_mask = _backend.keep_mask
predictive_mask = _backend.predictive_mask
log_prob = _backend.log_prob
policy_loss = _backend.policy_loss
predictive_policy_loss = _backend.predictive_policy_loss
