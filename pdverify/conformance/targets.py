"""Someone else's function: found by name, called with what it names, its answer made plain.

The protocol: a target receives its inputs by parameter name and returns a bool tensor (True where
the token's gradient is kept) or a dict with any of `keep`, `divergence`, `coefficient`, `loss`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import queue
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdverify.batch import Batch, take
from pdverify.conformance.answers import Answer, Failure
from pdverify.conformance.questions import (
    ARGUMENTS,
    RETURNS,
    Question,
    arguments,
    differentiated,
)


class TargetError(ValueError):
    """The target cannot be judged; the message says why and how to mend it."""


@dataclass(frozen=True)
class Target:
    """A function to judge.

    Attributes:
        name: as the caller named it.
        function: the function.
        parameters: the inputs of the protocol it takes, by name.
    """

    name: str
    function: Callable[..., Any]
    parameters: tuple[str, ...]

    @property
    def differentiates(self) -> str | None:
        """The input at which a loss's gradient is judged: `logits`, else `logprobs`."""
        return differentiated(self.parameters)


def load_target(target: str | Callable[..., Any]) -> Target:
    """The target of that name (``module:function`` or ``path/to/file.py:function``).

    The current folder and the file's folder are importable while it is loaded and afterwards.

    Raises:
        TargetError: nothing of that name, it does not import, or it takes an unknown parameter
            without a default.
    """
    if callable(target):
        module = getattr(target, "__module__", "") or ""
        name = f"{module}:{getattr(target, '__qualname__', type(target).__name__)}"
        return Target(name, target, _parameters(name, target))
    place, colon, attribute = target.rpartition(":")
    if not colon or not place or not attribute:
        raise TargetError(
            f"TARGET {target!r}: expected module:function or path/to/file.py:function"
        )
    found: Any = _import(target, place)
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [n for n in vars(found) if callable(getattr(found, n)) and n[0] != "_"]
            shown = ", ".join(sorted(names)[:8]) or "none"
            raise TargetError(f"TARGET {target!r}: {place} has no {part!r}; functions: {shown}")
        found = getattr(found, part)
    if not callable(found):
        raise TargetError(
            f"TARGET {target!r}: {attribute} is a {type(found).__name__}, no function"
        )
    return Target(target, found, _parameters(target, found))


def _import(target: str, place: str) -> Any:
    path = Path(place)
    _importable(Path.cwd())
    try:
        if path.suffix != ".py":
            return importlib.import_module(place)
        if not path.is_file():
            raise TargetError(f"TARGET {target!r}: no file {place}")
        _importable(path.resolve().parent)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    except TargetError:
        raise
    except ModuleNotFoundError as error:
        hint = "install it, or name a file: path/to/file.py:function"
        raise TargetError(f"TARGET {target!r} does not import: {error}; {hint}") from error
    except Exception as error:
        raise TargetError(
            f"TARGET {target!r} does not import: {type(error).__name__}: {error}"
        ) from error


def _importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _parameters(name: str, function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise TargetError(f"TARGET {name!r}: its parameters cannot be read: {error}") from error
    taken = []
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise TargetError(
                f"TARGET {name!r}: parameter {parameter.name!r} is positional-only;"
                " inputs are passed by name"
            )
        if parameter.name in ARGUMENTS:
            taken.append(parameter.name)
        elif parameter.default is parameter.empty:
            import difflib

            close = difflib.get_close_matches(parameter.name, ARGUMENTS, n=3)
            hint = (
                f"did you mean {', '.join(close)}?" if close else f"known: {', '.join(ARGUMENTS)}"
            )
            raise TargetError(
                f"TARGET {name!r}: unknown parameter {parameter.name!r} without a default; {hint}"
            )
    if not taken:
        raise TargetError(
            f"TARGET {name!r} takes none of the protocol's inputs: {', '.join(ARGUMENTS)}"
        )
    return tuple(taken)


class Caller:
    """Calls a target in a thread of its own, so that a call that hangs can be given up.

    After a time-out the thread is told to stop; if it does not listen, it is left behind and the
    next call gets a new one.
    """

    def __init__(self, target: Target, time_limit: float) -> None:
        self.target, self.time_limit = target, time_limit
        self._first = True
        self._work: queue.SimpleQueue[Callable[[], None]] | None = None
        self._thread: threading.Thread | None = None

    def ask(self, question: Question) -> Answer:
        """The target's answer to `question`."""
        if question.presentation == "split":
            return self._split(question)
        answer = self._limited(lambda: _call(self.target, question))
        if question.presentation == "repeated" and answer.failure is None:
            again = self._limited(lambda: _call(self.target, question))
            return again if again.failure is not None else _same(answer, again)
        return answer

    def _split(self, question: Question) -> Answer:
        """One call per sequence, put together again."""
        parts = []
        for b in range(len(question.batch.tokens)):
            one = question.on(take(question.batch, slice(b, b + 1), slice(None)))
            parts.append(self.ask(replace(one, presentation="contiguous")))
            if parts[-1].failure is not None:
                return parts[-1]
        # a loss that is reduced over the batch is another one over its parts
        reduced = {name for name, value in parts[0].values.items() if value.ndim == 0}
        gradients = [part.gradient for part in parts if part.gradient is not None]
        return Answer(
            {
                name: np.concatenate([part.values[name] for part in parts])
                for name in parts[0].values
                if name not in reduced
            },
            np.concatenate(gradients) if gradients and not reduced else None,
        )

    def _limited(self, call: Callable[[], Answer]) -> Answer:
        done: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        if self._thread is None:
            self._work = queue.SimpleQueue()
            self._thread = threading.Thread(target=_serve, args=(self._work,), daemon=True)
            self._thread.start()
        assert self._work is not None
        self._work.put(lambda: done.put(call()))
        # the first call may import and compile
        limit, self._first = self.time_limit * (1 + self._first), False
        try:
            return done.get(timeout=limit)
        except queue.Empty:
            _stop(self._thread)
            self._thread = None
            message = f"did not return within {limit:g} s (--time-limit {self.time_limit:g})"
            return Answer(failure=Failure("time-out", message))


def _serve(work: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        try:
            work.get()()
        except _Stopped:
            return


class _Stopped(BaseException):
    """Raised inside a thread whose call has been given up."""


def _stop(thread: threading.Thread) -> None:
    import ctypes

    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(_Stopped)
    )


def _call(target: Target, question: Question) -> Answer:
    import torch

    given = tensors(question, target.parameters)
    at = target.differentiates if question.loss else None
    if at is not None:
        given[at].requires_grad_()
    before = {}
    if question.presentation == "guarded":
        before = {
            name: value.detach().clone()
            for name, value in given.items()
            if isinstance(value, torch.Tensor)
        }
    try:
        with torch.set_grad_enabled(at is not None):
            returned = target.function(**given)
        answer = _read(returned, question, given, at)
    except _Unusable as error:
        return Answer(failure=Failure("form", str(error)))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return Answer(failure=Failure("raised", f"raised {type(error).__name__}: {lines[0]}"))
    for name, copy in before.items():
        changed = _changed(copy, given[name].detach())
        if changed is not None:
            return Answer(failure=Failure("modified", f"modified its input {name} at {changed}"))
    return answer


def _changed(before: Any, after: Any) -> list[int] | None:
    """Where two tensors of one shape differ, NaN being equal to NaN."""
    same = (before == after) | ((before != before) & (after != after))
    if bool(same.all()):
        return None
    return [int(i) for i in (~same).nonzero()[0]]


class _Unusable(Exception):
    """An answer of the wrong form."""


def torch_dtype(name: str) -> Any:
    """The torch dtype of a number format or of an argument's dtype name."""
    import torch

    short = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    return getattr(torch, short.get(name, name))


def tensors(question: Question, names: tuple[str, ...]) -> dict[str, Any]:
    """The question's arguments as torch tensors (and numbers), laid out as it says."""
    import torch

    made: dict[str, Any] = {}
    for name, value in arguments(question, names).items():
        kind = ARGUMENTS[name]
        if kind == "number":
            made[name] = value
            continue
        dtype = torch_dtype(question.batch.dtype if kind == "working" else kind)
        tensor = torch.as_tensor(np.ascontiguousarray(value)).to(dtype, copy=True)
        made[name] = _strided(tensor) if question.presentation == "strided" else tensor
    return made


def _strided(tensor: Any) -> Any:
    """An equal tensor that is a non-contiguous view of a larger one, in every dimension."""
    import torch

    shape = [2 * n + 1 for n in tensor.shape]
    # the neighbors hold other plausible values: reading across them goes unnoticed otherwise
    larger = tensor.flatten()[torch.arange(int(np.prod(shape))) % tensor.numel()].reshape(shape)
    view = larger.transpose(0, 1)[tuple(slice(1, None, 2) for _ in shape)].transpose(0, 1)
    view.copy_(tensor)
    return view.detach()


def _read(returned: Any, question: Question, given: dict[str, Any], at: str | None) -> Answer:
    if not isinstance(returned, dict):
        returned = {"keep": returned}
    unknown = [name for name in returned if name not in RETURNS]
    if unknown or not returned:
        raise _Unusable(f"returned a dict with {unknown or 'nothing'}; known: {', '.join(RETURNS)}")
    shape = question.batch.tokens.shape
    values: dict[str, NDArray[Any]] = {}
    gradient = None
    for name, value in returned.items():
        if name == "loss" and not question.loss:
            values[name] = np.zeros(())
            continue
        if name == "loss" and at is not None:
            masked = "response_mask" in given
            gradient = _gradient(value, given[at], None if masked else question.batch)
        array = _array(name, value)
        scalar = name == "loss" and array.size == 1
        if array.shape != shape and not scalar:
            raise _Unusable(f"{name} has shape {list(array.shape)}, expected {list(shape)}")
        if name == "keep" and array.dtype != np.bool_:
            raise _Unusable(f"keep has dtype {array.dtype}, expected bool")
        if name != "keep":
            array = array.astype(np.float64)
        values[name] = array.reshape(()) if scalar and array.shape != shape else array
    return Answer(values, gradient)


def _gradient(loss: Any, at: Any, batch: Batch | None) -> NDArray[np.float64]:
    """Gradient of the summed loss; with `batch`, of its valid tokens alone.

    A target that takes no response mask cannot know what is padding.
    """
    import torch

    if not isinstance(loss, torch.Tensor):
        raise _Unusable(f"loss is a {type(loss).__name__}; its gradient needs a torch tensor")
    if not loss.requires_grad:  # a constant: every token is dropped, or the graph is cut
        return np.zeros(at.shape)
    if batch is not None and loss.shape == batch.tokens.shape:
        loss = loss[torch.as_tensor(batch.response_mask)]
    (gradient,) = torch.autograd.grad(loss.sum(), at, allow_unused=True)
    if gradient is None:
        return np.zeros(at.shape)
    return np.asarray(gradient.detach().to(torch.float64).cpu().numpy())


def _array(name: str, value: Any) -> NDArray[Any]:
    import torch

    if value is None:
        raise _Unusable(f"{name} is None")
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.dtype.is_floating_point:
            value = value.to(torch.float64)
        return np.asarray(value.numpy())
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise _Unusable(f"{name} is no array: {error}") from error
    if array.dtype.kind not in "bif":
        raise _Unusable(
            f"{name} has dtype {array.dtype}, expected {'bool' if name == 'keep' else 'float'}"
        )
    return array


def _same(first: Answer, second: Answer) -> Answer:
    """`second`, or a failure that says where it differs from `first`."""
    for name, value in second.values.items():
        other = first.values[name]
        differs = (value != other) & ~((value != value) & (other != other))
        if differs.any():
            place = [int(i) for i in np.argwhere(differs)[0]]
            t = tuple(place)
            message = (
                f"gave two answers to the same input: {name}{place} is"
                f" {other[t].item()!r}, then {value[t].item()!r}"
            )
            return Answer(failure=Failure("wrong", message))
    return second
