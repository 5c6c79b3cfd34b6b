"""The inputs of the vectors, and how a batch is written.

An input is a `Batch` with a name that never changes: ``edge/NAME`` for each edge case,
``family/NAME`` for the families of `FAMILY_INPUTS` at one small size, ``large/NAME`` for the one
that is stored as tensors, and ``.../replaced`` where a missing sampled token takes the list's
last place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdverify.batch import Batch, Rows
from pdverify.cases import EDGE_CASES, FAMILIES, build, replace_last

SEED = 0
SMALL: dict[str, Any] = {"sequences": 2, "length": 4, "top_k": 5}
LARGE: dict[str, Any] = {"sequences": 1, "length": 4, "vocab_size": 4099, "top_k": 20}
LARGE_FILE = "large.safetensors"

FAMILY_INPUTS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "peaked": (33, "fp32", ("Basic",)),
    "flat": (33, "fp32", ("Basic",)),
    "near-one-hot": (33, "fp32", ("NearCertain",)),
    "near-equal": (33, "fp32", ("LowPrecisionDifference",)),
    "identical": (33, "fp32", ("Identical",)),
    "ties": (17, "bf16", ("TieAtLastPlace",)),
    "swapped": (17, "fp32", ("TiedTotalVariation",)),
    "training-tail": (33, "fp32", ("TailEstimator",)),
    "training-no-tail": (33, "fp32", ("TailFloor",)),
    "huge-scale": (17, "fp32", ("NearCertain",)),
    "padded-vocabulary": (33, "fp32", ("ProbabilityZero",)),
    "top-p-behavior": (17, "fp32", ("TruncatedSampling",)),
    "k-almost-all": (17, "fp32", ("EmptyTail",)),
    "sampled-outside": (33, "fp32", ("SampledOutsideList",)),
    "direction-conflict": (33, "fp32", ("DirectionConflict",)),
    "tail-conflict": (33, "fp32", ("TailEstimator",)),
    "near-threshold": (33, "fp32", ("NearThreshold",)),
}
"""Family -> vocabulary size, format of the logits, flags."""

PRIMARY = frozenset({"kl", "tv"})
"""Divergences that are taken on every input; the others on those that `Input.tries` names."""

CORE_FAMILIES = frozenset(
    {
        "family/peaked",
        "family/near-one-hot",
        "family/ties",
        "family/training-tail",
        "family/padded-vocabulary",
        "family/top-p-behavior",
        "family/sampled-outside",
        "family/direction-conflict",
        "family/near-threshold",
        "large/peaked",
    }
)
CORE_FLAGS = frozenset(
    {
        "DirectionConflict",
        "ImpossibleInTraining",
        "MassNotOne",
        "NearCertain",
        "Padding",
        "SampledOutsideList",
        "TailEstimator",
        "TiedTotalVariation",
    }
)
"""Edge cases with one of these are taken under every divergence."""

EDGE_FLAGS: dict[str, tuple[str, ...]] = {
    "sampled-outside-list": ("SampledOutsideList",),
    "listed-once": ("SampledListedTwice",),
    "no-tail-term": ("MissingTail",),
    "whole-vocabulary-retained": ("EmptyTail",),
    "training-tail-underflow": ("TailFloor",),
    "training-tail-at-threshold": ("TailFloor",),
    "truncated-both": ("TruncatedSampling",),
    "truncated-behavior": ("TruncatedSampling",),
    "tempered-both": ("OneSidedTemperature",),
    "tempered-training": ("OneSidedTemperature",),
    "half-precision-difference": ("LowPrecisionDifference",),
    "half-precision-probabilities": ("LowPrecisionDifference",),
    "near-certain-equal": ("NearCertain",),
    "near-certain-gap": ("NearCertain",),
    "near-certain-logprob": ("NearCertain",),
    "huge-log-ratio": ("RatioOverflow",),
    "ratio-overflow": ("RatioOverflow",),
    "phantom-column": ("ProbabilityZero",),
    "sharded-gradient": ("ShardedVocabulary",),
    "direction-against-ratio": ("DirectionConflict",),
    "aggregated-tail-wrong": ("TailEstimator",),
    "uniform-tail-wrong": ("TailEstimator",),
    "common-offset": ("CommonOffset",),
    "tie-at-last-place": ("TieAtLastPlace",),
    "sampled-takes-last-place": ("ReplaceSupport",),
    "sampled-impossible-in-training": ("ImpossibleInTraining",),
    "total-variation-not-ratio": ("RatioIsNotDistance",),
    "exactly-at-threshold": ("StrictThreshold",),
    "tied-total-variation": ("TiedTotalVariation",),
    "retained-mass-above-one": ("MassNotOne",),
    "vanishing-product": ("VanishingProduct",),
}
"""What an edge case is after, beyond what `Input.flags_of` sees in its bits."""


@dataclass(frozen=True, eq=False)
class Input:
    """One batch under a stable name.

    Attributes:
        name: as in the ids of the vectors.
        comment: what the batch is.
        batch: the input.
        source: how it was made: an edge case, or a family with its seed and size.
        flags: what it is after.
        stored: True where its arrays lie in `LARGE_FILE`.
        replaced: True where the top-K list holds the sampled token by substitution.
    """

    name: str
    comment: str
    batch: Batch
    source: dict[str, Any]
    flags: tuple[str, ...]
    stored: bool = False
    replaced: bool = False

    def flags_of(self, rows: Rows) -> set[str]:
        """Its own flags, and those that its bits speak for."""
        flags = set(self.flags)
        if not self.batch.response_mask.all():
            flags.add("Padding")
        floats = (rows.logits, rows.behavior_logits)
        if any(x is not None and np.isneginf(x).any() for x in floats):
            flags.add("ProbabilityZero")
        return flags

    def tries(self, divergence: str | None) -> bool:
        """Whether vectors of a divergence (or of none) are written for this input."""
        if divergence is None or divergence in PRIMARY or self.name in CORE_FAMILIES:
            return True
        own = self.flags_of(self.batch.rows())
        return self.name.startswith("edge/") and not own.isdisjoint(CORE_FLAGS)


def inputs() -> Iterator[Input]:
    """Every input, by name; the order of the registries."""
    for name, case in EDGE_CASES.items():
        source = {"edge_case": name}
        flags = EDGE_FLAGS.get(name, ())
        yield Input(f"edge/{name}", case.summary, case.batch, source, flags)
    for name, (vocab_size, dtype, flags) in FAMILY_INPUTS.items():
        size = {**SMALL, "vocab_size": vocab_size, "dtype": dtype}
        yield _family("family", name, size, flags)
    yield _family("large", "peaked", {**LARGE, "dtype": "fp32"}, ("LargeVocabulary",), stored=True)
    for base in inputs_to_replace():
        yield Input(
            f"{base.name}/replaced",
            "the sampled token has taken the last place of the top-K list",
            replace_last(base.batch),
            {**base.source, "replace_last": True},
            ("ReplaceSupport",),
            replaced=True,
        )


def inputs_to_replace() -> Iterator[Input]:
    """The inputs that also come with the sampled token in the list's last place."""
    name = "sampled-takes-last-place"
    yield Input(f"edge/{name}", "", EDGE_CASES[name].batch, {"edge_case": name}, ())
    size = {**SMALL, "vocab_size": 33, "dtype": "fp32"}
    yield _family("family", "sampled-outside", size, ())


def _family(
    kind: str, name: str, size: dict[str, Any], flags: tuple[str, ...], *, stored: bool = False
) -> Input:
    source = {"family": name, "seed": SEED, **size}
    comment = FAMILIES[name].description
    return Input(f"{kind}/{name}", comment, build(name, SEED, **size), source, flags, stored)


def float_text(x: float) -> str:
    """`x` exactly: C99 hexadecimal without trailing zeros, ``inf``, ``-inf`` or ``nan``."""
    mantissa, mark, exponent = float(x).hex().partition("p")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return mantissa + mark + exponent


def array_json(x: NDArray[Any]) -> dict[str, Any]:
    """An array as its dtype, shape and flat values (row-major); floats in hexadecimal."""
    values = x.reshape(-1).tolist()
    if x.dtype.kind == "f":
        values = [float_text(v) for v in values]
    return {"dtype": str(x.dtype), "shape": list(x.shape), "values": values}


def arrays_of(batch: Batch) -> dict[str, NDArray[Any]]:
    """The arrays that a batch carries, by field."""
    return {name: x for name, x in vars(batch).items() if isinstance(x, np.ndarray)}


def input_json(entry: Input) -> dict[str, Any]:
    """One entry of `inputs.json`."""
    batch = entry.batch
    arrays: dict[str, Any] = {
        name: {"dtype": str(x.dtype), "shape": list(x.shape), "tensor": f"{entry.name}/{name}"}
        if entry.stored and x.dtype.kind == "f" and x.ndim == 3
        else array_json(x)
        for name, x in arrays_of(batch).items()
    }
    result: dict[str, Any] = {
        "arrays": arrays,
        "comment": entry.comment,
        "format": batch.dtype,
        "logprob_format": batch.logprob_dtype,
        "source": entry.source,
        "vocab_size": batch.vocab_size,
    }
    if entry.stored:
        result["file"] = LARGE_FILE
    return result
