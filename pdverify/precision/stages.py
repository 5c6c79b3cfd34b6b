"""Where low precision enters: each stage by name, alone or together with others.

A `Source` holds exact policies.  A `Setting` says which format enters where between them and a
decision; a stage is one change of a setting.  `prepare` follows the setting up to the stored
numbers that a mask is handed: `Rows`, and radii that hold the exact numbers of whoever knows the
stored ones only.  What the mask then computes is the setting's `arithmetic`
(`pdverify.precision.evaluate`).

Stages that take a stored number apart from those that compute are told apart: the first are
*input noise*, the second *rounding*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pdverify.batch import Batch, InputError, Rows
from pdverify.definitions.cells import log_softmax
from pdverify.formats import FORMATS, SCALED, storage
from pdverify.precision.evaluate import Arithmetic
from pdverify.precision.noise import Radii, others
from pdverify.registry import Registry

Float64: TypeAlias = NDArray[np.float64]
Int64: TypeAlias = NDArray[np.int64]
Part: TypeAlias = Literal["full", "topk"]

TEMPERATURE = 0.7
"""Divisor of the logits in the temperature stages."""

EXACT = Arithmetic("fp64", "fp64")

UNIT = 2.0**-53


@dataclass(frozen=True, eq=False)
class Source:
    """Exact policies at `T` tokens.

    Attributes:
        name: for tables.
        logits, behavior_logits: `[T, V]` float64, taken as exact; -inf is probability zero.
        tokens: `[T]` int64, sampled ids.
        advantages: `[T]` float64, none of them 0.
        top_k: K of the top-K view, < V.
        rollouts: behavior logits `[T, V]` by stage and format, of a rollout that ran in it (the
            whole model, or its last product), on the same prefixes.
    """

    name: str
    logits: Float64
    behavior_logits: Float64
    tokens: Int64
    advantages: Float64
    top_k: int = 20
    rollouts: Mapping[tuple[str, str], Float64] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def vocab_size(self) -> int:
        """`V`."""
        return int(self.logits.shape[-1])

    def take(self, rows: slice) -> Source:
        """Some of the tokens."""
        return replace(
            self,
            **{
                name: getattr(self, name)[rows]
                for name in ("logits", "behavior_logits", "tokens", "advantages")
            },
            rollouts={key: x[rows] for key, x in self.rollouts.items()},
        )


def source_of(name: str, batch: Batch, top_k: int = 20) -> Source:
    """The policies of a batch in the full view, its stored logits taken as exact.

    Tokens with A = 0 get A = 1: the decision must hang on C.

    Raises:
        InputError: the batch has no behavior logits.
    """
    rows = batch.rows()
    if rows.logits is None or rows.behavior_logits is None:
        raise InputError(name, None, "topk", "precision needs both policies' logits")
    return Source(
        name,
        rows.logits.astype(np.float64),
        rows.behavior_logits.astype(np.float64),
        rows.tokens,
        np.where(rows.advantages == 0, 1.0, rows.advantages),
        min(top_k, rows.vocab_size - 2),
    )


@dataclass(frozen=True)
class Setting:
    """Which format enters where; None where nothing is rounded.

    Attributes:
        logits: both policies' logits are stored in it.
        logprobs: the behavior log-probs of a top-K view are stored in it.
        selection: the top-K list is chosen among behavior logits of it, ties by the lowest id.
        rollout: stage and format that the behavior policy's model ran in (`Source.rollouts`).
        temperature: logits are divided by it ...
        divided_in: ... in this format.
        arithmetic: of the mask.
    """

    logits: str | None = None
    logprobs: str | None = None
    selection: str | None = None
    rollout: tuple[str, str] | None = None
    temperature: float = 1.0
    divided_in: str | None = None
    arithmetic: Arithmetic = EXACT


@dataclass(frozen=True)
class Stage:
    """One place where low precision enters.

    Attributes:
        summary: one line, for tables and `--help`.
        enter: the setting with a format in this place.
        formats: names that make sense here.
        partitions: the views that it changes.
        model: it needs behavior logits of a model that ran in the format (`Source.rollouts`).
    """

    summary: str
    enter: Callable[[Setting, str], Setting]
    formats: tuple[str, ...]
    partitions: tuple[Part, ...] = ("full", "topk")
    model: bool = False


STAGES: Registry[Stage] = Registry("stage")

WIDE = ("fp64", "fp32")
STORED = tuple(name for name in FORMATS if name not in WIDE) + tuple(SCALED)
"""Formats that logits are stored in to save memory or time."""

COMPUTED = ("fp32", "tf32", "bf16", "fp16")
"""Formats that elementwise functions are computed in."""

SUMMED = ("fp32", "bf16", "fp16")
"""Formats of accumulators."""

_OPERANDS = ("bf16", *SCALED)


def _summed(order: Any) -> Callable[[Setting, str], Setting]:
    def enter(setting: Setting, name: str) -> Setting:
        return replace(setting, arithmetic=Arithmetic("fp32", name, order))

    return enter


STAGES.add(
    "stored-logits",
    Stage(
        "both policies' logits are stored in the format; all that follows is exact",
        lambda setting, name: replace(setting, logits=name),
        STORED,
    ),
)
STAGES.add(
    "stored-logprobs",
    Stage(
        "the behavior log-probs that the rollout engine returns are stored in the format",
        lambda setting, name: replace(setting, logprobs=name),
        ("fp32", "bf16", "fp16"),
        ("topk",),
    ),
)
STAGES.add(
    "softmax",
    Stage(
        "log-softmax and every elementwise operation in the format, sums in fp32",
        lambda setting, name: replace(setting, arithmetic=Arithmetic(name, "fp32")),
        COMPUTED,
    ),
)
for _order, _how in {
    "pairwise": "in a tree",
    "naive": "one term after the other",
    "blocked": "in blocks of 128, then in a tree",
    "compensated": "with compensation",
}.items():
    STAGES.add(
        f"sum-{_order}",
        Stage(
            f"sums {_how} in an accumulator of the format, functions in fp32",
            _summed(_order),
            SUMMED,
        ),
    )
STAGES.add(
    "temperature-before",
    Stage(
        f"stored logits are divided by {TEMPERATURE} in the format, before the upcast",
        lambda setting, name: replace(
            setting, logits=name, temperature=TEMPERATURE, divided_in=name
        ),
        ("bf16", "fp16"),
    ),
)
STAGES.add(
    "temperature-after",
    Stage(
        f"stored logits are divided by {TEMPERATURE} in fp32, after the upcast",
        lambda setting, name: replace(
            setting, logits=name, temperature=TEMPERATURE, divided_in="fp32"
        ),
        ("bf16", "fp16"),
    ),
)
STAGES.add(
    "top-k",
    Stage(
        "the engine chooses its top-K among logits of the format, ties by the lowest id",
        lambda setting, name: replace(setting, selection=name),
        ("bf16", "fp16", "e4m3"),
        ("topk",),
    ),
)


def _add_model(name: str, summary: str, formats: tuple[str, ...]) -> None:
    def enter(setting: Setting, number_format: str) -> Setting:
        return replace(setting, rollout=(name, number_format))

    STAGES.add(name, Stage(summary, enter, formats, model=True))


_add_model("lm-head", "the rollout's last product: operands in the format, sums in fp32", _OPERANDS)
_add_model("lm-head-sums", "the same, sums in bf16 too, one term after the other", ("bf16",))
_add_model("rollout-weights", "weights of the rollout's layers in the format", tuple(SCALED))
_add_model("rollout", "weights and activations of the rollout's layers in the format", _OPERANDS)


def together(names: str, number_format: str) -> Setting:
    """The setting of stages joined by ``+`` (``stored-logits+softmax``), all in one format.

    Raises:
        UnknownName: a name is in no registry.
        InputError: two stages in which the rollout's model runs.
    """
    setting = Setting()
    models = [name for name in names.split("+") if STAGES[name].model]
    if len(models) > 1:
        raise InputError("stage", None, names, f"a rollout runs once: {' or '.join(models)}")
    for name in names.split("+"):
        setting = STAGES[name].enter(setting, number_format)
    return setting


@dataclass(frozen=True, eq=False)
class Prepared:
    """What a mask is handed.

    Attributes:
        rows: stored numbers, both views.
        radii: hold the exact numbers.
        moved: `[T]` bool, the top-K list is another one than that of the exact logits.
        band: `[T, V]` bool or None: tokens of which the stored logits do not say whether they
            belong to the top-K list.
    """

    rows: Rows
    radii: Radii
    band: NDArray[np.bool_] | None = None


def exact_rows(source: Source, setting: Setting) -> Rows:
    """The rows of the exact policies (divided by the setting's temperature)."""
    kept = Setting(temperature=setting.temperature)
    return prepare(source, kept).rows


def prepare(source: Source, setting: Setting) -> Prepared:
    """Stored numbers of a source under a setting, and radii that hold the exact ones.

    Raises:
        InputError: the source has no rollout in the setting's format.
    """
    z, z_radius = _stored(source.logits, setting)
    y, y_radius = _rolled_out(source, setting)
    chosen, band = _top_list(source, setting, y)
    log_mu = log_softmax(y)
    y_reach = _logprob_radius(log_mu, y_radius)
    listed = np.take_along_axis(log_mu, chosen, axis=-1)
    listed_reach = None if y_reach is None else np.take_along_axis(y_reach, chosen, axis=-1)
    own = np.take_along_axis(log_mu, source.tokens[:, None], axis=-1)
    own_reach = (
        None if y_reach is None else np.take_along_axis(y_reach, source.tokens[:, None], axis=-1)
    )
    listed, listed_reach = _kept_in(setting.logprobs, listed, listed_reach)
    own, own_reach = _kept_in(setting.logprobs, own, own_reach)
    rows = Rows(
        index=np.stack([np.zeros_like(source.tokens), np.arange(len(source))], axis=1),
        tokens=source.tokens,
        advantages=source.advantages,
        vocab_size=source.vocab_size,
        logits=z,
        behavior_logits=y,
        logprobs=None,
        behavior_logprobs=own[:, 0],
        topk_ids=chosen,
        topk_logprobs=listed,
        dtype="fp64",
        logprob_dtype="fp64",
    )
    radii = Radii(z_radius, y_radius, listed_reach, None if own_reach is None else own_reach[:, 0])
    return Prepared(rows, radii, band)


def _stored(logits: Float64, setting: Setting) -> tuple[Float64, Float64 | None]:
    """Logits as they are handed on, and a radius that holds the exact ones."""
    radius: Float64 | None = None
    if setting.logits is not None:
        stored = storage(setting.logits).store(logits)
        logits, radius = stored.values, stored.radius
    return _divided(logits, radius, setting)


def _rolled_out(source: Source, setting: Setting) -> tuple[Float64, Float64 | None]:
    if setting.rollout is None:
        return _stored(source.behavior_logits, setting)
    if setting.rollout not in source.rollouts:
        known = ", ".join(" ".join(key) for key in source.rollouts) or "none"
        place, number_format = setting.rollout
        raise InputError(
            f"stage {place}", None, number_format, f"{source.name} has rollouts: {known}"
        )
    found = source.rollouts[setting.rollout]
    logits, radius = _stored(found, setting)
    with np.errstate(invalid="ignore"):
        away = np.abs(found - source.behavior_logits) * (1 + 4 * UNIT)
    away = np.where(np.isneginf(found) & np.isneginf(source.behavior_logits), 0.0, away)
    away = away / setting.temperature * (1 + 4 * UNIT)
    return logits, away if radius is None else radius + away


def _divided(
    logits: Float64, radius: Float64 | None, setting: Setting
) -> tuple[Float64, Float64 | None]:
    """Logits over the temperature, rounded to `divided_in`; the exact quotient is float64's."""
    if setting.temperature == 1.0:
        return logits, radius
    exact = logits / setting.temperature
    if setting.divided_in is None:
        return exact, radius
    form = FORMATS[setting.divided_in]
    rounded = form.round(exact)
    with np.errstate(invalid="ignore"):
        moved = form.half_spacing(rounded) + 2 * UNIT * np.abs(exact)
    moved = np.where(np.isneginf(exact), 0.0, moved)
    before = 0.0 if radius is None else radius / setting.temperature * (1 + 4 * UNIT)
    return rounded, moved + before


def _top_list(
    source: Source, setting: Setting, y: Float64
) -> tuple[Int64, NDArray[np.bool_] | None]:
    """The K likeliest ids, best first, and the tokens that might belong to them or not."""
    k = source.top_k
    if setting.selection is None:
        return _best(source.behavior_logits, k), None
    stored = storage(setting.selection).store(source.behavior_logits)
    chosen = _best(stored.values, k)
    with np.errstate(invalid="ignore"):
        low, high = stored.values - stored.radius, stored.values + stored.radius
    # in for certain: fewer than K others can be above; out: K others are above for certain
    border_low = -np.partition(-low, k - 1, axis=-1)[:, k - 1 : k]
    border_high = -np.partition(-high, k, axis=-1)[:, k : k + 1]
    return chosen, ~((low > border_high) | (high < border_low))


def _best(logits: Float64, k: int) -> Int64:
    return np.argsort(-logits, axis=-1, kind="stable")[:, :k].astype(np.int64)


def _logprob_radius(log_mu: Float64, radius: Float64 | None) -> Float64 | None:
    """How far a log-prob moves when logits move by at most `radius`, and float64's own error.

    `log mu_i` moves by `-log sum_j mu_j e^(d_j - d_i)`, at most `log sum_j mu_j e^|d_j - d_i|`
    either way (the upper side by Jensen): `log1p(sum_{j != i} mu_j (e^(r_i + r_j) - 1))`.
    """
    if radius is None:
        return None
    dead = np.isneginf(log_mu)
    r, mu = np.where(dead, 0.0, radius), np.exp(log_mu)
    with np.errstate(over="ignore", invalid="ignore"):
        grown = np.exp(r) * others(mu * np.expm1(r)) + np.expm1(r) * others(mu)
    own = np.where(dead, 0.0, np.abs(log_mu))
    moved = np.log1p(grown) * (1 + 2.0**-40) + 2.0**-46 * own + 2.0**-50 * others(mu)
    return np.where(dead, 0.0, np.where(np.isnan(moved), np.inf, moved))


def _kept_in(
    name: str | None, logprobs: Float64, radius: Float64 | None
) -> tuple[Float64, Float64 | None]:
    """Log-probs as they are stored; none is above 0."""
    if name is None:
        return np.minimum(logprobs, 0.0), radius
    stored = storage(name).store(np.minimum(logprobs, 0.0))
    return stored.values, stored.radius if radius is None else stored.radius + radius
