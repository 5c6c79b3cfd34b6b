"""Judges the released RL frameworks of `pdverify.adapters`, each in an environment of its own.

`python -m pdverify.tools.frameworks` needs a checkout and the package registry.  For every
framework it makes an environment under the work folder, installs the pinned release, runs
`pdverify check` on its adapters there, and writes the page from the reports.  What cannot be
installed or judged is a row "unavailable because ...".
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pdverify.adapters import ADAPTERS, Adapter, Framework
from pdverify.cases.recordings import replace_file

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT = 120
"""Seconds for one call: the first one imports the framework."""

CORE = ("torch", "numpy", "scipy", "python-flint", "ml_dtypes", "safetensors", "rich")
"""What pdverify itself needs; these pins of `constraints.txt` hold in every environment."""


class Unavailable(Exception):
    """Why a framework cannot be judged here."""


@dataclass(frozen=True)
class Outcome:
    """What came of one adapter: a report of `pdverify check --json`, or why there is none."""

    name: str
    adapter: Adapter
    report: dict[str, Any] | None
    unavailable: str | None


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; returns its exit status: 0 page written, 2 bad arguments."""
    parser = argparse.ArgumentParser(prog="python -m pdverify.tools.frameworks")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="frameworks or adapters to run; default: all"
    )
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "frameworks.md")
    parser.add_argument("--work", type=Path, default=ROOT / ".frameworks")
    options = parser.parse_args(arguments)
    if not (ROOT / "constraints.txt").is_file():
        parser.error(f"{ROOT} is no checkout of pdverify: it has no constraints.txt")
    for name in options.only or ():
        if not any(_is(name, known, adapter) for known, adapter in ADAPTERS.items()):
            known = sorted({adapter.framework.name for _, adapter in ADAPTERS.items()})
            parser.error(f"--only {name}: known: {', '.join([*known, *ADAPTERS])}")
    work = options.work.resolve()
    for framework in frameworks():
        wanted = [
            (name, adapter)
            for name, adapter in ADAPTERS.items()
            if adapter.framework == framework
            and (not options.only or any(_is(one, name, adapter) for one in options.only))
        ]
        if wanted:
            _judge(framework, wanted, work)
    outcomes = [stored(name, adapter, work) for name, adapter in ADAPTERS.items()]
    replace_file(options.page, page(outcomes).encode())
    print(f"{options.page} written")
    return 0


def frameworks() -> list[Framework]:
    """The frameworks of `ADAPTERS`, in its order."""
    return list(dict.fromkeys(adapter.framework for _, adapter in ADAPTERS.items()))


def _is(wanted: str, name: str, adapter: Adapter) -> bool:
    return wanted in (name, adapter.framework.name)


# ---- running


def _judge(framework: Framework, wanted: list[tuple[str, Adapter]], work: Path) -> None:
    folder = work / framework.name
    try:
        python = environment(framework, folder)
    except Unavailable as error:
        for name, adapter in wanted:
            _store(name, adapter, work, {"unavailable": str(error)})
            print(f"{name}: unavailable because {error}")
        return
    for name, adapter in wanted:
        found = _check(name, adapter, python, folder)
        _store(name, adapter, work, found)
        if "unavailable" in found:
            print(f"{name}: unavailable because {found['unavailable']}")
        else:
            print(f"{name}: {verdict(failures(found['report'], adapter))}")


def environment(framework: Framework, folder: Path) -> Path:
    """The Python of the framework's environment, made if it is not there yet.

    Raises:
        Unavailable: something could not be installed.
    """
    python = folder / "venv" / "bin" / "python"
    steps = _installs(framework, folder / "core.txt")
    recipe = json.dumps([" ".join(step) for step in steps])
    stamp = folder / "installed.json"
    if stamp.is_file() and stamp.read_text() == recipe and python.exists():
        return python
    folder.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    core = [pin for pin in pins if pin.partition("==")[0] in CORE]
    (folder / "core.txt").write_text("\n".join(core) + "\n")
    print(f"{framework.name}: making its environment", flush=True)
    _run([sys.executable, "-m", "venv", "--clear", str(folder / "venv")], "making an environment")
    for step in steps:
        _run([str(python), "-m", "pip", "install", "-q", *step], f"pip install {step[-1]}")
    replace_file(stamp, recipe.encode())
    return python


def _installs(framework: Framework, core: Path) -> list[list[str]]:
    """Arguments of `pip install`, in order: torch first, so that nothing picks another build."""
    own = [f"{framework.pin}"]
    held = ["-c", str(core)]
    steps = [[*held, "torch"], [*held, "-e", str(ROOT)]]
    if framework.no_deps:
        if framework.requirements:
            steps.append([*held, *framework.requirements])
        steps.append(["--no-deps", *own])
    else:
        steps.append([*held, *framework.requirements, *own])
    return steps


def _run(command: list[str], doing: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=_environ())
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        last = (errors or done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unavailable(f"{doing} failed: {last.removeprefix('ERROR:').strip()}")


def _environ() -> dict[str, str]:
    changes = {
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | changes


def arguments_of(adapter: Adapter) -> list[str]:
    """The arguments of `pdverify check` for an adapter."""
    limit = ["--time-limit", str(TIME_LIMIT)]
    return [adapter.target, "--mask", adapter.mask, *adapter.options, *limit]


def _check(name: str, adapter: Adapter, python: Path, folder: Path) -> dict[str, Any]:
    out = folder / f"{name.replace('/', '-')}.report.json"
    out.unlink(missing_ok=True)
    command = [str(python), "-m", "pdverify", "check", *arguments_of(adapter), "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=_environ(), cwd=folder)
    if done.returncode in (0, 1) and out.is_file():
        return {"report": json.loads(out.read_text())}
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}, no message"]
    return {"unavailable": lines[-1].removeprefix("pdverify: error: ")}


def _record(adapter: Adapter) -> dict[str, Any]:
    return {"package": adapter.framework.pin, "arguments": arguments_of(adapter)}


def _place(name: str, adapter: Adapter, work: Path) -> Path:
    return work / adapter.framework.name / f"{name.replace('/', '-')}.json"


def _store(name: str, adapter: Adapter, work: Path, found: dict[str, Any]) -> None:
    place = _place(name, adapter, work)
    place.parent.mkdir(parents=True, exist_ok=True)
    replace_file(place, json.dumps(_record(adapter) | found).encode())


def stored(name: str, adapter: Adapter, work: Path) -> Outcome:
    """What an earlier run found, if it ran this very release with these very arguments."""
    place = _place(name, adapter, work)
    if place.is_file():
        found = json.loads(place.read_text())
        if {key: found.get(key) for key in _record(adapter)} == _record(adapter):
            return Outcome(name, adapter, found.get("report"), found.get("unavailable"))
    return Outcome(name, adapter, None, "it was not run")


# ---- the page


def failures(report: dict[str, Any], adapter: Adapter) -> list[dict[str, Any]]:
    """The failed checks of a report, each with the convention that the source follows."""
    read_as = dict(adapter.read_as)
    found = []
    for check in report["checks"]:
        if check["status"] != "failed":
            continue
        named = check["convention"]
        convention = read_as.get(named, named)
        kind = "wrong" if check["kind"] == "convention" and convention is None else check["kind"]
        found.append({**check, "kind": kind, "convention": convention})
    return found


def verdict(failed: list[dict[str, Any]]) -> str:
    """The failed checks of a report in one phrase."""
    if not failed:
        return "conforms"
    if all(check["kind"] == "convention" for check in failed):
        return "differs by convention"
    return f"differs ({', '.join(check['id'] for check in failed)})"


def page(outcomes: Iterable[Outcome]) -> str:
    """The page, in Markdown."""
    outcomes = list(outcomes)
    judged = [outcome.report for outcome in outcomes if outcome.report is not None]
    lines = [
        "<!-- Written by `make frameworks`; do not edit. -->",
        "",
        "# Released frameworks",
        "",
        *_INTRODUCTION,
    ]
    if judged:
        used = judged[0]["versions"]
        lines += [f"Judged with pdverify {used['pdverify']} and torch {used['torch']}.", ""]
    lines += [
        "| framework | version | function | judged as | verdict | decisions wrong | effective bits"
        " | conventions | smallest counterexample |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(outcome) for outcome in outcomes]
    for framework in dict.fromkeys(outcome.adapter.framework for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.adapter.framework == framework]
        lines += ["", *_section(framework, own)]
    return "\n".join(lines) + "\n"


_INTRODUCTION = (
    "What `pdverify check` says of the trust-region masks in released packages, called as they",
    "are, on a CPU. A framework whose mask sits inside a loss is judged through that loss; where",
    "it is a surrogate such as -A r, through its gradient g alone, and what a row then calls the",
    "loss is the sum of g log pi_k.",
    "",
    "A difference is not a bug by itself. *differs by convention*: documented conventions explain",
    "every difference, and `--accept` takes them. *differs*: some answer is outside the rounding",
    "budget and no documented convention explains it; the notes of each package say what that",
    "means in training. *decisions wrong*: of those that are certain for the bits given.",
    "Effective bits belong to the sign of a coefficient; ratio-direction masks have none.",
    "",
    "Three checks look where training seldom goes. `loss.padding` puts NaN on padding: a loss that",
    "multiplies by the mask, instead of selecting with it, lets it through, which is harmless as",
    "long as padding holds finite numbers. `loss.small-ratio` has importance ratios down to",
    "e^-110, `loss.overflow` up to e^92.",
    "",
)


def _row(outcome: Outcome) -> str:
    adapter = outcome.adapter
    head = [
        adapter.framework.package,
        adapter.framework.version,
        f"`{adapter.function.rpartition('.')[2]}` ({outcome.name})",
        f"`{adapter.mask}`",
    ]
    if outcome.report is None:
        return _cells([*head, f"unavailable because {outcome.unavailable}", "", "", "", ""])
    report = outcome.report
    decisions, bits = report["decisions"], report["effective_bits"]
    failed = failures(report, adapter)
    conventions = sorted({check["convention"] for check in failed if check["convention"]})
    return _cells(
        [
            *head,
            verdict(failed),
            f"{decisions['wrong']} of {decisions['determined']}",
            _bits(bits),
            ", ".join(f"`{name}`" for name in conventions) or "none",
            _smallest(failed),
        ]
    )


def _cells(texts: list[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in texts) + " |"


def _bits(bits: dict[str, Any] | None) -> str:
    if bits is None:
        return "none"
    if bits.get("at_least") is not None:
        return f">= {bits['at_least']:.1f}"
    return f"{bits['estimate']:.1f} ({bits['low']:.1f} to {bits['high']:.1f})"


def _smallest(failed: list[dict[str, Any]]) -> str:
    """The counterexample with the fewest numbers; the first among equals."""
    shown = [check for check in failed if check["counterexample"]]
    if not shown:
        return ""
    check = min(shown, key=lambda one: _size(one["counterexample"]["inputs"]))
    example = check["counterexample"]
    inputs = ", ".join(
        f"{name} {_compact(value, example['dtypes'].get(name, ''))}"
        for name, value in example["inputs"].items()
        if not (name == "response_mask" and _flat(value) == [True])
    )
    return (
        f"`{check['id']}`: {inputs}: {example['quantity']} expected {example['expected']},"
        f" got {example['got']}"
    )


def _flat(value: Any) -> list[Any]:
    return [x for one in value for x in _flat(one)] if isinstance(value, list) else [value]


def _size(inputs: dict[str, Any]) -> int:
    return sum(len(_flat(value)) for value in inputs.values())


def _compact(value: Any, dtype: str) -> str:
    """Numbers in the shortest form that reads back to the same bits; one alone without brackets."""
    flat = _flat(value)

    def text(x: Any) -> str:
        if x is None:
            return "nan"
        if isinstance(x, float) and dtype == "float32":
            return str(np.float32(x))
        return str(x)

    texts = [text(x) for x in flat]
    return texts[0] if len(texts) == 1 else f"[{' '.join(texts)}]"


def _section(framework: Framework, outcomes: list[Outcome]) -> list[str]:
    lines = [f"## {framework.package} {framework.version}", ""]
    for note in framework.notes:
        lines += [_wrapped(note), ""]
    lines += [_wrapped(_installed(framework)), ""]
    for outcome in outcomes:
        adapter = outcome.adapter
        lines += [f"### {outcome.name}", ""]
        through = " Judged through the gradient alone." if adapter.gradient_only else ""
        called = f"`{adapter.function}` in `{adapter.file}`: {adapter.settings}.{through}"
        lines += [_wrapped(called), ""]
        options = " ".join(adapter.options)
        lines += [f"    pdverify check {adapter.target} --mask {adapter.mask} {options}", ""]
        if outcome.report is None:
            lines += [_wrapped(f"Unavailable because {outcome.unavailable}."), ""]
            continue
        failed = failures(outcome.report, adapter)
        ran = [c for c in outcome.report["checks"] if c["status"] in ("passed", "failed")]
        if not failed:
            lines += [f"All {len(ran)} checks that apply pass.", ""]
            continue
        lines += [
            f"{len(ran) - len(failed)} of {len(ran)} checks that apply pass.",
            "",
            "| check | differs | decisions wrong | what came |",
            "|---|---|---|---|",
        ]
        for check in failed:
            counts = check["decisions"]
            wrong = f"{counts['wrong']} of {counts['determined']}" if counts["determined"] else ""
            why = f"convention `{check['convention']}`" if check["convention"] else check["kind"]
            lines.append(_cells([f"`{check['id']}`", why, wrong, check["message"]]))
        lines.append("")
    return lines[:-1]


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 99, break_long_words=False, break_on_hyphens=False)


def _installed(framework: Framework) -> str:
    beside = ", ".join(["torch", *(f"`{name}`" for name in framework.requirements)])
    how = " with `--no-deps`" if framework.no_deps else ""
    text = f"Installed: `{framework.pin}`{how}, beside {beside}."
    if framework.placeholders:
        names = ", ".join(f"`{name}`" for name in framework.placeholders)
        text += f" Empty placeholders at import: {names}."
    if framework.bare:
        names = ", ".join(f"`{name}`" for name in framework.bare)
        text += f" Not run: the `__init__` of {names}."
    return text


if __name__ == "__main__":
    sys.exit(main())
