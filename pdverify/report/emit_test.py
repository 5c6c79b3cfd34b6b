"""The failures of a target as a pytest file that needs torch and the target, not this package."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdverify.cases.recordings import replace_file
from pdverify.conformance.records import CheckRecord, TargetCounterexample, TargetReport
from pdverify.report.json_report import check_writable
from pdverify.report.literals import cells, literal

MARK = '"""Written by pdverify'
"""How every written file begins; a file that begins otherwise is not replaced."""

LARGEST = 20_000
"""Numbers of a counterexample above which it is no literal to read or to commit."""

ON_PADDING = "0 on padding"
"""What is expected of a loss and of a gradient where there is no token."""

DIGITS = 5e-10
"""Relative rounding of an expected value, which a report holds to nine digits."""


class _Inexpressible(Exception):
    """A failure that no test without this package can show; the message says why."""


@dataclass(frozen=True)
class _Failure:
    """A failed check with the counterexample that a test is made of."""

    check: CheckRecord
    example: TargetCounterexample
    outputs: tuple[str, ...]


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """Make sure that `path` is free or holds what `write_test` wrote.

    Raises:
        OSError: something else is there, or nothing can be written there.
    """
    target = check_writable(path)
    if target.exists() and not target.read_bytes().startswith(MARK.encode()):
        raise FileExistsError(f"{path}: the file exists and was not written by --emit-test")


def write_test(report: TargetReport, path: str | os.PathLike[str]) -> int:
    """Write one test per failure to `path`, whole or not at all, and return their number.

    Nothing is written where nothing failed.  What no test can show stands in a comment.

    Raises:
        OSError: as `check_replaceable`, or when the disk is full.
        ValueError: the target has no name that a file could import.
    """
    check_replaceable(path)
    if not report.failed:
        return 0
    tests, comments = [], []
    for check in report.failed:
        try:
            tests.append(_test(check, report.outputs))
        except _Inexpressible as why:
            comments.append(f"# {check.id}: {_flat(check.message)}\n# Not a test: {why}.\n")
    folder = Path(path).resolve().parent
    parts = [_head(report, folder, "\n".join(tests)), *tests, *comments]
    text = "\n\n".join(part.rstrip() + "\n" for part in parts)
    replace_file(Path(path).resolve(), text.encode(errors="backslashreplace"))
    return len(tests)


def _head(report: TargetReport, folder: Path, tests: str) -> str:
    version = report.versions.get("pdverify", "")
    named = [x for x in ("view", "tail", "support", "precision") if getattr(report, x) is not None]
    options = " ".join(f"--{name} {getattr(report, name)}" for name in named)
    target = _flat(report.target).replace("\\", "/").replace('"', "'")
    lines = [
        f"{MARK} {version}: wrong answers of {target}, as tests.",
        "",
        f"Judged as {report.mask} {options}.",
        "Needs torch and pytest; a second run of --emit-test replaces this file.",
        '"""',
        "",
        *_imports(report.target, folder),
    ]
    helpers = [text for name, text in _HELPERS.items() if f"{name}(" in tests]
    return "\n".join(lines) + "\n" + "\n".join(f"\n{text}" for text in helpers)


def _imports(target: str, folder: Path) -> Iterator[str]:
    place, _, name = target.rpartition(":")
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"target {target!r}: a test cannot import it by that name")
    path = Path(place)
    is_file = path.suffix == ".py"
    root = path.resolve().parent if is_file else Path.cwd()
    yield "import importlib.util" if is_file else "import importlib"
    yield from ("import math", "import sys", "from pathlib import Path", "", "import torch", "")
    yield "inf, nan = math.inf, math.nan"
    yield f"FOLDER = (Path(__file__).parent / {os.path.relpath(root, folder)!r}).resolve()"
    yield "sys.path.insert(0, str(FOLDER))"
    if is_file:
        yield f"_FILE = FOLDER / {path.name!r}"
        yield f"_SPEC = importlib.util.spec_from_file_location({path.stem!r}, _FILE)"
        yield "_MODULE = importlib.util.module_from_spec(_SPEC)"
        yield f"sys.modules[{path.stem!r}] = _MODULE"
        yield "_SPEC.loader.exec_module(_MODULE)"
    else:
        yield f"_MODULE = importlib.import_module({place!r})"
    yield f"target = _MODULE.{name}"


_HELPERS = {
    "value_of": '''
def value_of(answer, name):
    """What the target returned as `name`; a bare answer is `keep`."""
    answer = answer if isinstance(answer, dict) else {"keep": answer}
    return torch.as_tensor(answer[name])
''',
    "gradient_of": '''
def gradient_of(inputs):
    """Gradient of the summed loss at the logits, or at the log-probs."""
    at = inputs["logits" if "logits" in inputs else "logprobs"].requires_grad_()
    loss = target(**inputs)["loss"].sum()
    if not loss.requires_grad:
        return torch.zeros_like(at)
    (gradient,) = torch.autograd.grad(loss, at, allow_unused=True)
    return torch.zeros_like(at) if gradient is None else gradient
''',
    "by_sequence": '''
def by_sequence(inputs):
    """The target called with one sequence at a time, the answers put together again."""
    count = len(next(x for x in inputs.values() if isinstance(x, torch.Tensor)))
    parts = [
        target(**{k: x[b : b + 1] if isinstance(x, torch.Tensor) else x for k, x in inputs.items()})
        for b in range(count)
    ]
    parts = [part if isinstance(part, dict) else {"keep": part} for part in parts]
    joined = {name: [torch.as_tensor(part[name]) for part in parts] for name in parts[0]}
    return {name: torch.cat(torch.atleast_1d(*values)) for name, values in joined.items()}
''',
    "strided": '''
def strided(x):
    """An equal tensor that is a view of a larger one, contiguous in no dimension."""
    shape = [2 * n + 1 for n in x.shape]
    larger = x.flatten()[torch.arange(math.prod(shape)) % x.numel()].reshape(shape)
    view = larger.transpose(0, 1)[tuple(slice(1, None, 2) for _ in shape)].transpose(0, 1)
    view.copy_(x)
    return view
''',
}
"""Functions that a written file holds where one of its tests calls them."""


def _test(check: CheckRecord, outputs: tuple[str, ...]) -> str:
    example = check.counterexample
    if example is None:
        raise _Inexpressible("there is no counterexample")
    left_out = [name for name in example.dtypes if name not in example.inputs]
    if left_out:
        raise _Inexpressible(f"its input is too large to keep ({', '.join(left_out)})")
    count = sum(cells(value) for value in example.inputs.values())
    if count > LARGEST:
        raise _Inexpressible(f"its input has {count} numbers; the JSON report holds them")
    body = list(_body(_Failure(check, example, outputs)))
    facts = {
        "exact": example.exact,
        "got": example.got,
        "margin": "" if math.isnan(example.margin) else f"{example.margin!r}",
        "budget": "" if math.isnan(example.budget) else f"{example.budget!r}",
        "likely cause": check.cause or "",
        "rerun": check.rerun,
    }
    lines = [
        f"def test_{re.sub('[^0-9a-zA-Z]+', '_', check.id)}():",
        f"# {check.id}: {_flat(check.message)}",
        *(f"# {name}: {_flat(text)}" for name, text in facts.items() if text),
        *_literals(example),
        *body,
    ]
    return "\n".join([lines[0], *(f"    {line}" if line else "" for line in lines[1:])]) + "\n"


def _literals(example: TargetCounterexample) -> Iterator[str]:
    yield "inputs = {"
    for name, value in example.inputs.items():
        if not isinstance(value, list):
            yield f"    {name!r}: {value!r},"
            continue
        dtype = f"torch.{example.dtypes[name]}"
        lines = literal(value, example.dtypes[name]).splitlines()
        if len(lines) == 1 and len(lines[0]) + len(name) < 60:
            yield f"    {name!r}: torch.tensor({lines[0]}, dtype={dtype}),"
            continue
        yield f"    {name!r}: torch.tensor("
        yield from (f"        {line}" for line in lines[:-1])
        yield f"        {lines[-1]},"
        yield f"        dtype={dtype},"
        yield "    ),"
    yield "}"
    if example.presentation == "strided":
        yield "inputs = {k: strided(x) if torch.is_tensor(x) else x for k, x in inputs.items()}"


def _body(failure: _Failure) -> Iterator[str]:
    example = failure.example
    quantity, place = example.quantity, example.place
    if failure.check.kind == "time-out":
        raise _Inexpressible("a call that does not return cannot be told from a slow one")
    if quantity == "inputs":
        yield from (
            "before = {k: x.clone() for k, x in inputs.items() if torch.is_tensor(x)}",
            "target(**inputs)",
            "for name, x in before.items():",
            "    assert torch.equal(x.nan_to_num(), inputs[name].nan_to_num()), name",
        )
        return
    if quantity == "answer":
        yield from _usable(failure)
        return
    through_loss = quantity == "gradient" or (quantity == "keep" and "keep" not in failure.outputs)
    if example.presentation == "split" and through_loss:
        raise _Inexpressible("it shows in a loss that is taken sequence by sequence")
    if through_loss:
        yield "gradient = gradient_of(inputs)"
    else:
        call = "by_sequence(inputs)" if example.presentation == "split" else "target(**inputs)"
        yield f"got = value_of({call}, {quantity!r})"
    where = "" if place is None else f"[{place[0]}, {place[1]}]"
    got = "gradient" if through_loss else "got"
    if quantity == "keep":
        yield from _decision(example, got, where)
    elif example.expected == ON_PADDING:
        yield f"assert bool(({got}{where} == 0).all())"
    else:
        yield from _close(example, got + where)


def _usable(failure: _Failure) -> Iterator[str]:
    """That there is an answer, of the right form, and the same twice."""
    if failure.example.presentation == "repeated":
        yield "first, again = target(**inputs), target(**inputs)"
        for name in failure.outputs:
            yield (
                f"assert torch.equal(value_of(first, {name!r}).nan_to_num(),"
                f" value_of(again, {name!r}).nan_to_num())"
            )
        return
    sizes = [(name, x) for name, x in failure.example.inputs.items() if isinstance(x, list)]
    if not sizes:
        raise _Inexpressible("no tensor says which shape an answer has")
    at = sizes[0][0]
    yield "answer = target(**inputs)"
    yield "for name in answer if isinstance(answer, dict) else ['keep']:"
    yield "    value = value_of(answer, name)"
    yield "    scalar_loss = name == 'loss' and value.ndim == 0"
    yield f"    assert scalar_loss or value.shape == inputs[{at!r}].shape[:2], name"
    yield "    assert (value.dtype == torch.bool) == (name == 'keep'), name"


def _decision(example: TargetCounterexample, got: str, where: str) -> Iterator[str]:
    if example.margin == 0:
        yield "# at the threshold itself, where rounding may drop a token, but not all of them"
        yield "moved = inputs['advantages'] != 0"
        if "response_mask" in example.inputs:
            yield "moved &= inputs['response_mask']"
        yield f"assert bool(({got}[moved] != 0).any())"
        return
    kept = f"bool(({got}{where} != 0).any())" if got == "gradient" else f"bool({got}{where})"
    yield f"assert {kept}" if example.expected == "kept" else f"assert not {kept}"


def _close(example: TargetCounterexample, got: str) -> Iterator[str]:
    text, _, column = example.expected.partition(" at column ")
    found = re.fullmatch(r"\[(\S+), (\S+)\]", text)
    low, high = (found[1], found[2]) if found else (text, text)
    try:
        slack = DIGITS * max(abs(float(low)), abs(float(high)))
    except ValueError:
        raise _Inexpressible(f"the right answer is {text!r}, no number") from None
    if not (math.isfinite(example.budget) and math.isfinite(slack)):
        raise _Inexpressible("no finite budget says how close an answer has to be")
    if example.error <= example.budget + slack:
        raise _Inexpressible("it is smaller than the ninth digit, to which the answer is known")
    got = f"{got}[{column}]" if column else got
    yield f"budget = {example.budget!r}"
    if slack > 0:
        yield f"budget += {slack!r}  # the expected value has nine digits"
    if low == high:
        yield f"assert abs(float({got}) - {low}) <= budget"
    else:
        yield f"assert {low} - budget <= float({got}) <= {high} + budget"


def _flat(text: Any) -> str:
    return " ".join(str(text).split())
