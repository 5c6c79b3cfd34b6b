"""Who is measured: every backend of the registry, and what they are compared with."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from pdverify.backends import BACKENDS, Backend
from pdverify.batch import Batch
from pdverify.budgets import ANY_ORDER, CHAIN, Form
from pdverify.registry import Registry
from pdverify.rules import Tail
from pdverify.tools.bench import baselines, ceilings
from pdverify.tools.bench.baselines import Outcome
from pdverify.tools.bench.inputs import Inputs, from_batch
from pdverify.tools.bench.records import Role
from pdverify.tools.bench.workloads import (
    BY_ROWS,
    EXPONENTIALS,
    HEAD,
    MATERIALIZED,
    PRODUCT,
    READ,
    Kind,
    Workload,
)

Prepare: TypeAlias = Callable[[Workload, Inputs], Callable[[], Any]]
"""`(workload, inputs) -> call`; the call is what is timed."""

Values: TypeAlias = Callable[[Workload, Batch, str, str], dict[str, Any]]
"""`(workload, batch, precision, device)`: D, C and the decisions of the valid tokens, `[T]`."""

LOGITS: tuple[Kind, ...] = ("mask", "loss")
ALL: tuple[Kind, ...] = (*LOGITS, "head")


def _available() -> None:
    return None


@dataclass(frozen=True)
class Contestant:
    """One thing that is measured.

    Attributes:
        name: as on the command line.
        role: what it stands for.
        summary: one line.
        kinds: the kinds of workload that are timed.
        prepare: see `Prepare`; the call of anything but a ceiling gives an `Outcome`.
        values: see `Values`; None for a ceiling.
        views: the views of the behavior policy that it does.
        devices: where it can run.
        reason: why it cannot run here, or None.
        precisions: of its arithmetic.
        tail: the tail estimator of its top-K coefficient.
        form, longest: the rounding budget that it is held to.
    """

    name: str
    role: Role
    summary: str
    kinds: tuple[Kind, ...]
    prepare: Prepare
    values: Values | None = None
    views: tuple[str, ...] = ("full", "topk")
    devices: Callable[[], tuple[str, ...]] = lambda: ("cpu", "cuda")
    reason: Callable[[], str | None] = _available
    precisions: tuple[str, ...] = ("fp32",)
    tail: Tail = "exact"
    form: Form = "plain"
    longest: int = ANY_ORDER

    def does(self, workload: Workload) -> bool:
        """Whether it is timed on the workload."""
        return workload.kind in self.kinds and workload.view in self.views

    def refuses(self, device: str) -> str | None:
        """Why it cannot run on `device`, or None."""
        try:
            reason = self.reason()
            if reason is None and device not in self.devices():
                reason = f"it does not run on {device}"
        except ImportError as error:
            reason = f"it cannot be imported: {error}"
        return reason


def contestants() -> Registry[Contestant]:
    """Every backend, then the baselines and the ceilings."""
    found: Registry[Contestant] = Registry("contestant")
    for name, entry in BACKENDS.items():
        found.add(name, _backend(entry))
    for contestant in _OTHERS:
        found.add(contestant.name, contestant)
    return found


def chosen(workload: Workload, backends: Sequence[str]) -> list[Contestant]:
    """Everything that is timed on the workload; of the backends, those asked for (none: all)."""
    return [
        x
        for _, x in contestants().items()
        if x.does(workload) and (x.role != "backend" or not backends or x.name in backends)
    ]


def _backend(entry: Backend) -> Contestant:
    kinds = LOGITS if entry.module is not None else ()
    return Contestant(
        entry.name,
        "backend",
        entry.summary,
        ("head",) if entry.name == HEAD else kinds,
        partial(_prepare, entry),
        partial(_bound_values, entry),
        devices=entry.devices,
        reason=entry.unavailable,
        precisions=entry.precisions,
        form=entry.form,
        longest=CHAIN,
    )


def _prepare(entry: Backend, workload: Workload, inputs: Inputs) -> Callable[[], Outcome]:
    """The call that a trainer makes: one mask, one loss with its gradient, or one log-prob."""
    about = {**inputs.behavior(workload), "compute_dtype": torch.float32}
    tokens, advantages = inputs.tokens, inputs.advantages
    if workload.kind == "head":
        functions = importlib.import_module("pdverify.backends.linear_head")
        head = functions.LinearHead(inputs.hidden, inputs.head)

        def log_prob() -> Outcome:
            with torch.no_grad():
                return {"log_prob": functions.log_prob(head, tokens)}

        return log_prob
    assert entry.module is not None
    functions, logits = importlib.import_module(entry.module), inputs.logits.detach()
    if workload.kind == "mask":
        about["rule"] = workload.rule()
        return lambda: {"keep": functions.keep_mask(logits, tokens, advantages, **about)}

    def loss() -> Outcome:
        leaf = logits.detach().requires_grad_()
        loss = functions.predictive_policy_loss(
            leaf,
            tokens,
            advantages,
            ratio_cap=baselines.RATIO_CAP,
            aggregation="none",
            **about,
        )
        (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        return {"loss": loss.detach(), "gradient": gradient}

    return loss


def _bound_values(
    entry: Backend, workload: Workload, batch: Batch, precision: str, device: str
) -> dict[str, Any]:
    bound, index = entry.bind(batch, precision, device), tuple(batch.rows().index.T)
    name, view = workload.divergence, workload.view
    return {
        "divergence": bound.divergence(name, view)[index],
        "coefficient": bound.coefficient(name, view, workload.tail)[index],
        "keep": bound.keep(workload.rule())[index],
    }


def _function(
    name: str,
    summary: str,
    function: Callable[[Workload, Inputs], Outcome],
    kinds: tuple[Kind, ...],
    role: Role = "baseline",
    **more: Any,
) -> Contestant:
    """A contestant made of one function, which gives everything at once."""

    def values(workload: Workload, batch: Batch, _: str, device: str) -> dict[str, Any]:
        outcome = function(workload, from_batch(batch, device))
        return {x: y[0].double().cpu().numpy() for x, y in outcome.items()}

    def prepare(workload: Workload, inputs: Inputs) -> Callable[[], Outcome]:
        return lambda: function(workload, inputs)

    return Contestant(name, role, summary, kinds, prepare, values, **more)


def _fused(name: str, devices: tuple[str, ...]) -> Contestant:
    return _function(
        name,
        "its fused linear cross-entropy",
        partial(baselines.fused_cross_entropy, name),
        ("head",),
        reason=partial(baselines.missing, name),
        devices=lambda: devices,
    )


_OTHERS = (
    _function(
        MATERIALIZED,
        "as training code has it: fp32 log-softmaxes, exp and sums of all rows at once",
        baselines.materialized,
        ALL,
    ),
    _function(
        BY_ROWS,
        f"the same code, {baselines.ROWS} rows at a time ({baselines.HEAD_ROWS} behind a head)",
        baselines.by_rows,
        ALL,
    ),
    _function(
        "topk-frameworks",
        "top-K divergence as frameworks have it: gathered log-probs, tails by 1 - sum",
        baselines.top_k_by_frameworks,
        ("mask",),
        views=("topk",),
        tail="aggregated",
    ),
    _fused("cut-cross-entropy", ("cpu", "cuda")),
    _fused("liger-kernel", ("cuda",)),
    *(
        _function(
            f"planted-{name}-softmax",
            f"the materialized code with its softmaxes in {name}",
            partial(baselines.materialized, form=form),
            (),
            "planted",
        )
        for name, form in (("bf16", torch.bfloat16), ("fp16", torch.float16))
    ),
    Contestant(READ, "ceiling", "torch's sum over what is read", ALL, ceilings.read),
    Contestant(
        EXPONENTIALS,
        "ceiling",
        "torch's exp of every logit, in the cache",
        ALL,
        ceilings.exponentials,
    ),
    Contestant(PRODUCT, "ceiling", "hidden states times the head", ("head",), ceilings.product),
)
