"""Trust-region masks in eager torch, on any device: ``torch-eager``.

Must agree with `pdverify.definitions`; importable by a trainer that has torch alone::

    from pdverify.backends.torch_eager import predictive_mask

The plainest of the torch backends: every divergence from its own cells, log-ratios from
differences of logits.  The functions are those of `pdverify.backends.masks.TorchBackend`.
"""

from __future__ import annotations

from pdverify.backends.engine import Engine
from pdverify.backends.losses import aggregate as aggregate
from pdverify.backends.masks import TorchBackend


class TorchEager(Engine):
    """Cells of each divergence, one by one: no moment is used in their place."""

    from_moments = frozenset()


_backend = TorchBackend(TorchEager())
divergence = _backend.divergence
coefficient = _backend.coefficient
keep_mask = _backend.keep_mask
predictive_mask = _backend.predictive_mask
log_prob = _backend.log_prob
policy_loss = _backend.policy_loss
predictive_policy_loss = _backend.predictive_policy_loss
