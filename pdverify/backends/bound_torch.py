"""A torch backend bound to a batch: tensors in the dtype a trainer would have."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdverify.batch import Batch
from pdverify.rules import Partition, Rule, Tail

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class BoundTorch:
    """See `pdverify.backends.Bound`; `module` has the functions of `TorchBackend`."""

    def __init__(self, module: Any, batch: Batch, precision: str, device: str) -> None:
        self._module, self._device = module, device
        self._compute = torch.float64 if precision == "fp64" else torch.float32
        logits = DTYPES[batch.dtype]

        def tensor(x: NDArray[Any] | None, dtype: torch.dtype | None = None) -> Tensor | None:
            return None if x is None else torch.as_tensor(x, dtype=dtype, device=device)

        valid = batch.response_mask
        self._logits = tensor(batch.logits, logits)
        self._tokens = tensor(np.where(valid, batch.tokens, 0))
        self._advantages = tensor(batch.advantages)
        self._valid = tensor(valid)
        ids = batch.topk_ids
        ids = None if ids is None else np.where(valid[..., None], ids, 0)
        self._behavior: dict[str, Tensor | None] = {
            "behavior_logits": tensor(batch.behavior_logits, logits),
            "behavior_logprobs": tensor(batch.behavior_logprobs),
            "topk_ids": tensor(ids),
            "topk_logprobs": tensor(batch.topk_logprobs),
        }
        # entries that differ in the tail or the rule alone share these
        self.divergence = cache(self._divergence)
        self.coefficient = cache(self._coefficient)

    def _divergence(self, name: str, partition: Partition) -> NDArray[Any]:
        return self._array(
            self._module.divergence(
                self._logits,
                self._tokens,
                name=name,
                partition=partition,
                compute_dtype=self._compute,
                **self._behavior,
            )
        )

    def _coefficient(self, name: str, partition: Partition, tail: Tail | None) -> NDArray[Any]:
        return self._array(
            self._module.coefficient(
                self._logits,
                self._tokens,
                name=name,
                partition=partition,
                tail=tail,
                compute_dtype=self._compute,
                **self._behavior,
            )
        )

    def keep(self, rule: Rule) -> NDArray[Any]:
        kept = self._module.keep_mask(
            self._logits,
            self._tokens,
            self._advantages,
            rule=rule,
            response_mask=self._valid,
            compute_dtype=self._compute,
            **self._behavior,
        )
        return np.asarray(kept.cpu().numpy())

    def loss(
        self, keep: NDArray[Any], ratio_cap: float, aggregation: str
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        assert self._logits is not None
        logits = self._logits.detach().clone().requires_grad_()
        loss = self._module.policy_loss(
            logits,
            self._tokens,
            self._advantages,
            self._behavior["behavior_logprobs"],
            torch.as_tensor(keep, device=self._device),
            response_mask=self._valid,
            ratio_cap=ratio_cap,
            aggregation=aggregation,
            compute_dtype=self._compute,
        )
        (gradient,) = torch.autograd.grad(loss.sum(), logits)
        return self._array(loss.detach()), self._array(gradient)

    @staticmethod
    def _array(x: Tensor) -> NDArray[Any]:
        return x.double().cpu().numpy()
