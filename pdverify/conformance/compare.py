"""Two JSON reports of the same thing, before and after: what got worse, what got better."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pdverify.conformance.records import SCHEMA_VERSION

_SETTINGS = (
    "target",
    "mask",
    "view",
    "tail",
    "support",
    "precision",
    "level",
    "seed",
    "real_source",
)
"""Fields of a report that say what was judged, and how; `options` and `versions` are tables."""

State: TypeAlias = Literal["right", "accepted", "wrong", "not judged"]


@dataclass(frozen=True)
class Change:
    """`name`: of a check, of an entry with its device, of a setting; `old`, `new`: as text."""

    name: str
    old: str
    new: str


@dataclass(frozen=True)
class Comparison:
    """What differs between two reports.

    Attributes:
        environment: versions, options, seed, level and the like that differ: what else changed
            may come from them.  A failure that is accepted now, or no longer, is one of them.
        new_failures: wrong now, and not before (a check that was not there before included).
        mended: right now, wrong before; not where it is merely accepted now.
        precision_lost: effective bits whose intervals no longer overlap, and are lower now;
            worst errors that exceed their budget now and did not.
        vanished: judged before; missing now, or no longer judged.
    """

    environment: list[Change]
    new_failures: list[Change]
    mended: list[Change]
    precision_lost: list[Change]
    vanished: list[Change]

    @property
    def regressed(self) -> bool:
        """Whether anything got worse."""
        return bool(self.new_failures or self.precision_lost or self.vanished)


@dataclass(frozen=True)
class _Item:
    """One check or one entry. `worst`: errors over budget by name; `bits`: (low, high)."""

    state: State
    message: str
    worst: dict[str, float]
    bits: tuple[float, float] | None


def read_report(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The report that `pdverify check --json` wrote to `path`.

    Raises:
        ValueError: naming the file and why it is no such report.
        OSError: it cannot be read.
    """
    try:
        report = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    try:
        _items(report)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return dict(report)


def compare_reports(old: dict[str, Any], new: dict[str, Any]) -> Comparison:
    """What changed from `old` to `new`, both reports on a target or both on the built-ins.

    Raises:
        ValueError: one of them is no report, or they are of different kinds.
    """
    before, after = _items(old), _items(new)
    if ("checks" in old) != ("checks" in new):
        kinds = [("built-in backends", "a target")["checks" in x] for x in (old, new)]
        raise ValueError(f"the old report is on {kinds[0]}, the new one on {kinds[1]}")
    environment = list(_environment(old, new))
    failures: list[Change] = []
    mended: list[Change] = []
    lost: list[Change] = []
    vanished: list[Change] = []
    for name, item in after.items():
        was = before.get(name)
        if item.state == "wrong" and (was is None or was.state != "wrong"):
            text = "not there" if was is None else was.state
            failures.append(Change(name, text, item.message or "wrong"))
        if item.state == "right" and was is not None and was.state == "wrong":
            mended.append(Change(name, was.message or "wrong", "right"))
        if was is not None:
            lost += _lost(name, was, item)
            if was.state != item.state and "accepted" in (was.state, item.state):
                environment.append(Change(name, was.state, item.state))
    for name, was in before.items():
        item = after.get(name, _Item("not judged", "missing", {}, None))
        if was.state != "not judged" and item.state == "not judged":
            vanished.append(Change(name, was.state, item.message or "not judged"))
        elif was.bits is not None and item.state != "not judged" and item.bits is None:
            vanished.append(Change(f"{name}: effective bits", _interval(was.bits), "not measured"))
    return Comparison(environment, failures, mended, lost, vanished)


def _lost(name: str, was: _Item, item: _Item) -> Iterator[Change]:
    if was.bits is not None and item.bits is not None and item.bits[1] < was.bits[0]:
        yield Change(f"{name}: effective bits", _interval(was.bits), _interval(item.bits))
    for quantity, worst in item.worst.items():
        before = was.worst.get(quantity)
        if worst > 1 and before is not None and before <= 1:
            yield Change(f"{name}: {quantity}", f"{before:.3g}", f"{worst:.3g}")


def _interval(bits: tuple[float, float]) -> str:
    low, high = bits
    return f"at least {low:.1f}" if math.isinf(high) else f"[{low:.1f}, {high:.1f}]"


def _environment(old: dict[str, Any], new: dict[str, Any]) -> Iterator[Change]:
    pairs = [(name, old.get(name), new.get(name)) for name in _SETTINGS]
    for table in ("options", "versions"):
        before, after = old.get(table) or {}, new.get(table) or {}
        names = [name for name in dict.fromkeys((*before, *after)) if name not in _SETTINGS]
        pairs += [(f"{table}: {name}", before.get(name), after.get(name)) for name in names]
    pairs.append(("precision of the entries", _precisions(old), _precisions(new)))
    for name, was, now in pairs:
        if was != now:
            yield Change(name, _shown(was), _shown(now))


def _precisions(report: dict[str, Any]) -> str | None:
    names = sorted({str(entry.get("precision")) for entry in report.get("entries", ())})
    return ", ".join(names) or None


def _shown(x: Any) -> str:
    return "none" if x is None else str(x)


def _items(report: Any) -> dict[str, _Item]:
    """Every check or entry by name; the whole target, for its effective bits, is one too.

    Raises:
        ValueError: saying why `report` is none.
    """
    if not isinstance(report, dict) or not {"conforms", "schema_version"} <= set(report):
        raise ValueError("not a report of `pdverify check --json`")
    version = report["schema_version"]
    if version != SCHEMA_VERSION:
        raise ValueError(f"schema_version {version!r}; this release reads {SCHEMA_VERSION}")
    for table in ("options", "versions"):
        _require(report.get(table, {}), dict, table)
    if "checks" in report:
        records, read = report["checks"], _check
    elif "entries" in report:
        records, read = report["entries"], _entry
    else:
        raise ValueError("a report without `checks` and without `entries`")
    found: dict[str, _Item] = {}
    for i, record in enumerate(_require(records, list, "checks or entries")):
        name, item = read(_require(record, dict, f"record {i}"), f"record {i}")
        if name in found:
            raise ValueError(f"record {i}: {name!r} is there twice")
        found[name] = item
    for i, record in enumerate(_require(report.get("certificates", []), list, "certificates")):
        found |= [_certificate(_require(record, dict, f"certificate {i}"), f"certificate {i}")]
    if "checks" in report:
        bits = _bits(report.get("effective_bits"), "effective_bits")
        found["target"] = _Item("right", "", {}, bits)
    return found


def _check(record: dict[str, Any], where: str) -> tuple[str, _Item]:
    name = _require(record.get("id"), str, f"{where}: id")
    status = record.get("status")
    states: dict[Any, State] = {
        "passed": "right",
        "accepted": "accepted",
        "failed": "wrong",
        "not-applicable": "not judged",
        "not-run": "not judged",
    }
    if not isinstance(status, str) or status not in states:
        raise ValueError(f"{where}: status {status!r}; known: {', '.join(states)}")
    worst = _errors({"error over budget": record.get("worst")}, where)
    return name, _Item(states[status], str(record.get("message") or status), worst, None)


def _entry(record: dict[str, Any], where: str) -> tuple[str, _Item]:
    name = _require(record.get("name"), str, f"{where}: name")
    conforms = record.get("conforms")
    if conforms is not None:
        _require(conforms, bool, f"{where}: conforms")
    states: dict[Any, State] = {True: "right", False: "wrong", None: "not judged"}
    errors = _require(record.get("error_over_budget") or {}, dict, f"{where}: error_over_budget")
    message = record.get("message") or record.get("unavailable") or ""
    bits = _bits(record.get("effective_bits"), f"{where}: effective_bits")
    key = f"{name} ({record.get('device')})"
    return key, _Item(states[conforms], str(message), _errors(errors, where), bits)


def _certificate(record: dict[str, Any], where: str) -> tuple[str, _Item]:
    wrong = _require(record.get("wrong"), dict, f"{where}: wrong")
    count, trials = (_number(wrong.get(name), where) for name in ("successes", "trials"))
    state: State = "wrong" if count else "right" if trials else "not judged"
    message = f"contradicted on {count:.0f} of {trials:.0f}" if count else ""
    return f"certificate {record.get('certificate')}, {record.get('source')}", _Item(
        state, message, {}, None
    )


def _errors(errors: dict[str, Any], where: str) -> dict[str, float]:
    return {name: _number(x, f"{where}: {name}") for name, x in errors.items() if x is not None}


def _bits(bits: Any, where: str) -> tuple[float, float] | None:
    if bits is None:
        return None
    _require(bits, dict, where)
    if bits.get("at_least") is not None:
        return _number(bits["at_least"], where), math.inf
    if bits.get("low") is None or bits.get("high") is None:
        return None
    return _number(bits["low"], where), _number(bits["high"], where)


def _number(x: Any, where: str) -> float:
    if x == "inf":
        return math.inf
    if isinstance(x, bool) or not isinstance(x, int | float):
        raise ValueError(f"{where}: {x!r} is no number")
    return float(x)


def _require(x: Any, kind: type, where: str) -> Any:
    if not isinstance(x, kind):
        raise ValueError(f"{where}: {x!r} is no {kind.__name__}")
    return x
