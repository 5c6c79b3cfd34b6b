"""The program that judges the frameworks: everything but the installing."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdverify.adapters import ADAPTERS
from pdverify.tools import frameworks
from pdverify.tools.frameworks import Outcome, Unavailable

ROOT = Path(__file__).resolve().parents[2]
CHECK = {
    "id": "loss.cap",
    "status": "failed",
    "kind": "convention",
    "convention": "ratio-cap-3",
    "message": "gradient at [0, 0]: expected 4 | got 3",
    "decisions": {"total": 0, "determined": 0, "wrong": 0, "rounding": 0},
    "counterexample": {
        "quantity": "gradient",
        "place": [0, 0],
        "expected": "4",
        "got": "3",
        "inputs": {
            "logprobs": [[-0.3132616877555847]],
            "advantages": [[-1.0]],
            "response_mask": [[True]],
            "delta": 0.1,
        },
        "dtypes": {"logprobs": "float32", "advantages": "float32", "delta": "number"},
    },
}


def _report(*checks: dict[str, Any], bits: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "checks": [{**CHECK, "id": "mask.decisions", "status": "passed"}, *checks],
        "decisions": {"total": 9, "determined": 8, "wrong": 2, "rounding": 0},
        "effective_bits": bits,
        "versions": {"pdverify": "0", "torch": "0"},
    }


def _outcome(report: dict[str, Any] | None, unavailable: str | None = None) -> Outcome:
    return Outcome("verl/dppo-tv", ADAPTERS["verl/dppo-tv"], report, unavailable)


def _row(page: str) -> list[str]:
    (row,) = [line for line in page.splitlines() if line.startswith("| verl |")]
    return [cell.strip() for cell in row.replace("\\|", "/").strip("|").split("|")]


def _verdict(*checks: dict[str, Any], read_as: tuple[tuple[str, str | None], ...] = ()) -> str:
    adapter = replace(ADAPTERS["verl/dppo-tv"], read_as=read_as)
    return frameworks.verdict(frameworks.failures(_report(*checks), adapter))


def test_a_verdict_tells_conventions_from_other_differences() -> None:
    other = {**CHECK, "id": "loss.value", "kind": "wrong", "convention": None}
    assert _verdict() == "conforms"
    assert _verdict({**CHECK, "status": "accepted"}) == "conforms"
    assert _verdict(CHECK) == "differs by convention"
    assert _verdict(CHECK, other) == "differs (loss.cap, loss.value)"


def test_a_convention_that_the_source_does_not_follow_is_not_named() -> None:
    assert _verdict(CHECK, read_as=(("ratio-cap-3", "ratio-cap-5"),)) == "differs by convention"
    assert _verdict(CHECK, read_as=(("ratio-cap-3", None),)) == "differs (loss.cap)"
    assert _verdict(CHECK, read_as=(("ratio-cap-5", None),)) == "differs by convention"


def test_the_page_has_what_a_report_says() -> None:
    page = frameworks.page([_outcome(_report(CHECK))])
    assert _row(page) == [
        "verl",
        "0.9.1",
        "`compute_policy_loss_dppo_tv` (verl/dppo-tv)",
        "`dppo-binary-tv`",
        "differs by convention",
        "2 of 8",
        "none",
        "`ratio-cap-3`",
        "`loss.cap`: logprobs -0.3132617, advantages -1.0, delta 0.1: gradient expected 4, got 3",
    ]
    assert "| `loss.cap` | convention `ratio-cap-3` |  | gradient at [0, 0]: expected 4 \\|" in page
    assert "1 of 2 checks that apply pass." in page


@pytest.mark.parametrize(
    ("bits", "shown"),
    [
        ({"at_least": 21.25, "estimate": None, "low": None, "high": None}, ">= 21.2"),
        ({"at_least": None, "estimate": 8.0, "low": 7.5, "high": 8.5}, "8.0 (7.5 to 8.5)"),
    ],
)
def test_effective_bits(bits: dict[str, Any], shown: str) -> None:
    assert _row(frameworks.page([_outcome(_report(bits=bits))]))[6] == shown


def test_the_smallest_counterexample_is_shown() -> None:
    large = json.loads(json.dumps(CHECK))
    large["id"] = "loss.value"
    large["counterexample"]["inputs"]["logprobs"] = [[-0.5, -1.0, None]]
    cell = _row(frameworks.page([_outcome(_report(large, CHECK))]))[-1]
    assert cell.startswith("`loss.cap`")
    alone = _row(frameworks.page([_outcome(_report(large))]))[-1]
    assert "logprobs [-0.5 -1.0 nan]" in alone


def test_what_cannot_be_judged_is_a_row_with_the_reason() -> None:
    page = frameworks.page([_outcome(None, "pip install verl failed: no network")])
    assert _row(page)[4] == "unavailable because pip install verl failed: no network"
    assert "Unavailable because pip install verl failed: no network." in page


def _run(tmp_path: Path, *more: str) -> str:
    page = tmp_path / "page.md"
    work = tmp_path / "work"
    assert frameworks.main(["--page", str(page), "--work", str(work), *more]) == 0
    return page.read_text()


def test_a_failed_installation_reaches_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def environment(framework: Any, folder: Path) -> Path:
        raise Unavailable(f"pip install {framework.pin} failed")

    monkeypatch.setattr(frameworks, "environment", environment)
    page = _run(tmp_path, "--only", "areal")
    assert "unavailable because pip install areal==1.0.4 failed" in page
    rows = [line for line in page.splitlines() if "unavailable because it was not run" in line]
    assert len(rows) == len(ADAPTERS) - 1


def test_a_missing_framework_is_told_by_the_program_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real program, in an environment without the framework."""
    monkeypatch.setattr(frameworks, "environment", lambda framework, folder: Path(sys.executable))
    (tmp_path / "work" / "areal").mkdir(parents=True)
    page = _run(tmp_path, "--only", "areal/ppo")
    assert "areal is not installed: pip install areal==1.0.4" in page


def test_a_report_of_another_release_is_not_shown(tmp_path: Path) -> None:
    adapter = ADAPTERS["areal/ppo"]
    place = tmp_path / "areal" / "areal-ppo.json"
    place.parent.mkdir()
    found = {
        "package": adapter.framework.pin,
        "arguments": frameworks.arguments_of(adapter),
        "report": _report(),
    }
    place.write_text(json.dumps(found))
    assert frameworks.stored("areal/ppo", adapter, tmp_path).report == _report()
    place.write_text(json.dumps({**found, "package": "areal==1.0.3"}))
    assert frameworks.stored("areal/ppo", adapter, tmp_path).unavailable == "it was not run"


def test_an_unknown_name_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        frameworks.main(["--only", "verll"])
    assert stopped.value.code == 2
    assert "verl/dppo-tv" in capsys.readouterr().err


def test_a_command_that_fails_says_so() -> None:
    script = "import sys; print('ERROR: No matching distribution', file=sys.stderr); sys.exit(1)"
    with pytest.raises(Unavailable, match="installing failed: No matching distribution"):
        frameworks._run([sys.executable, "-c", script], "installing")


def test_the_committed_page_covers_every_adapter() -> None:
    page = (ROOT / "docs" / "frameworks.md").read_text()
    prose = " ".join(page.split())
    for name, adapter in ADAPTERS.items():
        assert f"({name}) | `{adapter.mask}` |" in page
        assert f"## {adapter.framework.package} {adapter.framework.version}" in page
        for note in adapter.framework.notes:
            assert note in prose
