"""JSON reports: strict, complete, whole or absent."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdverify.report.json_report import check_writable, to_json, write_json
from tests.report import target_sample
from tests.report.sample import ABSENT, RIGHT, WRONG, report
from tests.report.target_sample import CONVENTION, FAILED, PASSED, target_report


def _strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def written(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "report.json"
    write_json(report(RIGHT, WRONG, ABSENT), path)
    read: dict[str, Any] = _strict(path.read_text())
    return read


def test_the_file_is_what_to_json_says(written: dict[str, Any]) -> None:
    assert written == to_json(report(RIGHT, WRONG, ABSENT))


def test_top_level_fields(written: dict[str, Any]) -> None:
    assert written["schema_version"] == 1
    assert written["conforms"] is False
    assert (written["seed"], written["level"], written["seconds"]) == (41, "quick", 12.3)
    assert written["versions"] == {"pdverify": "0.1.0", "torch": "2.13.0"}
    assert written["real_source"] == "the recording of the package"
    assert written["decisions"] == {
        "total": 2504,
        "determined": 2306,
        "wrong": 7,
        "rounding": 28,
    }
    assert written["inputs"][0] == {
        "name": "llama.cpp",
        "kind": "real",
        "tokens": 24,
        "vocab_size": 49152,
        "dtype": "bf16",
    }
    assert written["certificates"][0]["certified"]["successes"] == 140


def test_entries_are_records_of_their_own(written: dict[str, Any]) -> None:
    right, wrong, absent = written["entries"]
    assert right["target"] == right["name"] == RIGHT.name
    assert right["mask"] == "predictive-squared-hellinger"
    assert (right["view"], right["tail"], right["support"]) == ("topk", "aggregated", "append")
    assert (right["seed"], right["versions"]) == (written["seed"], written["versions"])
    assert right["decisions"] == {"total": 1201, "determined": 1102, "wrong": 0, "rounding": 13}
    assert right["effective_bits"]["at_least"] == 21.4
    assert right["effective_bits"]["estimate"] is None
    bits = wrong["effective_bits"]
    assert (bits["estimate"], bits["low"], bits["high"]) == (23.8, 22.9, 24.6)
    assert bits["at_least"] is None
    errors = right["error_over_budget"]
    assert errors == {"divergence": 0.31, "coefficient": 0.42, "loss": 0.53}
    assert [e["conforms"] for e in (right, wrong, absent)] == [True, False, None]
    assert absent["unavailable"] == "no NVIDIA GPU is present"
    assert wrong["message"] == WRONG.message


def test_what_json_cannot_hold(written: dict[str, Any]) -> None:
    example = written["entries"][1]["counterexample"]
    assert example["got"] is None
    assert example["error"] == "inf"
    assert example["place"] == [3, 17]
    assert example["context"]["token"] == 421
    assert example["context"]["advantage"] == -1.5
    assert written["entries"][1]["error_over_budget"]["coefficient"] == "inf"
    assert written["directions"][1]["disagree"]["share"] is None


def test_an_existing_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    write_json(report(), path)
    assert _strict(path.read_text())["conforms"] is True
    assert os.listdir(tmp_path) == ["report.json"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_a_link_keeps_pointing(tmp_path: Path) -> None:
    path, link = tmp_path / "report.json", tmp_path / "latest"
    link.symlink_to(path)
    write_json(report(), link)
    assert link.is_symlink()
    assert path.is_file()


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_json(report(), path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.json"]


@pytest.mark.parametrize("path", ["missing/report.json", ".", "file/report.json", "/dev/null"])
def test_where_nothing_can_be_written(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(OSError, match=path):
        check_writable(path)
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_that_admits_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    with pytest.raises(OSError, match=r"not writable \(Permission denied\)"):
        check_writable(tmp_path / "report.json")


@pytest.fixture
def target_written(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "report.json"
    write_json(target_report(PASSED, FAILED, CONVENTION, target_sample.ABSENT), path)
    read: dict[str, Any] = _strict(path.read_text())
    return read


def test_a_report_on_a_target(target_written: dict[str, Any]) -> None:
    checks = target_written.pop("checks")
    bits = target_written.pop("effective_bits")
    assert target_written == {
        "schema_version": 1,
        "conforms": False,
        "target": "masks:keep",
        "mask": "predictive-kl",
        "view": "topk",
        "tail": "exact",
        "support": "append",
        "precision": "fp32",
        "options": {"mask": "predictive-kl", "tail": "exact", "delta": 0.15, "top_k": 5},
        "outputs": ["keep", "loss"],
        "parameters": ["logits", "tokens", "delta"],
        "bits_note": "",
        "decisions": {"total": 252, "determined": 236, "wrong": 7, "rounding": 8},
        "convention": None,
        "seed": 41,
        "level": "quick",
        "seconds": 12.3,
        "versions": {"pdverify": "0.1.0", "torch": "2.13.0"},
    }
    assert (bits["estimate"], bits["low"], bits["high"], bits["at_least"]) == (
        23.8,
        22.9,
        24.6,
        None,
    )
    assert [(check["id"], check["passed"]) for check in checks] == [
        ("size.k-one", True),
        ("mask.boundary", False),
        ("loss.gradient", False),
        ("loss.cap", True),
    ]


def test_a_check_of_a_target(target_written: dict[str, Any]) -> None:
    check = target_written["checks"][2]
    example = check.pop("counterexample")
    assert check == {
        "id": "loss.gradient",
        "passed": False,
        "status": "failed",
        "kind": "convention",
        "convention": "ratio-gradient",
        "message": CONVENTION.message,
        "cause": "gradient through the ratio",
        "decisions": {"total": 0, "determined": 0, "wrong": 0, "rounding": 0},
        "worst": "inf",
        "rerun": CONVENTION.rerun,
        "seconds": 0.5,
    }
    assert example["quantity"] == "gradient"
    assert example["place"] == [0, 1]
    assert (example["expected"], example["got"], example["margin"]) == ("0.5", "1.5", None)
    assert example["inputs"]["logits"] == [[[0.5, "-inf", 1.25], [0.75, 0.0, -2.5]]]
    assert example["dtypes"] == target_sample.KEEP.dtypes
    assert target_written["checks"][0]["counterexample"] is None


def test_text_that_is_no_unicode(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_json(target_report(replace(FAILED, message="raised ValueError: \udc80")), path)
    assert _strict(path.read_text())["checks"][0]["message"] == "raised ValueError: \udc80"
