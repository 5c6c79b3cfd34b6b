"""The studies by name."""

from __future__ import annotations

from pdverify.registry import Registry
from simulations.studies import (
    coupled,
    direction,
    estimator_bias,
    gradient_bias,
    training,
    trust_region,
    unsafe_keep,
)
from simulations.studies.study import Study

STUDIES: Registry[Study] = Registry("study")
for _module in (
    direction,
    coupled,
    estimator_bias,
    gradient_bias,
    unsafe_keep,
    training,
    trust_region,
):
    STUDIES.add(_module.STUDY.name, _module.STUDY)
