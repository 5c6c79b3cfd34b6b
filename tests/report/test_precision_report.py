"""A precision study as text, JSON, page and HTML; the committed page is what its runs give."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pdverify import cli
from pdverify.precision.certify import Estimate
from pdverify.precision.records import Options, Report, merged
from pdverify.precision.statistics import rate_of
from pdverify.report import precision_tables
from pdverify.report.precision_console import print_precision
from pdverify.report.precision_page import RUN, WHAT, page, page_html, write_page
from pdverify.report.records_json import read_record, write_record
from pdverify.tools import low_precision

ROOT = Path(__file__).parents[2]
ARGUMENTS = [
    *("precision", "--input", "peaked", "--vocab", "64", "--tokens", "32"),
    *("--stage", "stored-logits", "softmax", "--format", "bf16", "fp32"),
]


@pytest.fixture(scope="module")
def study() -> Report:
    options = Options(
        inputs=("peaked",), formats=("bf16", "e4m3"), vocab_size=64, tokens=32, divergences=("kl",)
    )
    return low_precision.run(options, lambda *_: None)


def _text(report: Report) -> str:
    out = io.StringIO()
    print_precision(report, out)
    return out.getvalue()


def test_console_fits_and_ends_with_the_answer(study: Report) -> None:
    text = _text(study)
    command, rest = study.command, text
    assert command in text
    assert all(len(line) <= 100 for line in rest.replace(command, "").splitlines())
    assert "- Upcast (more than 2 % of the keep/drop decisions change): stored-logits in" in text
    assert text.rstrip().endswith("decisions flipped outside its certificate (exit 0)")
    line = next(x for x in text.splitlines() if x.startswith("stored-logits      e4m3"))
    assert line.split()[-1] == "yes"


def test_wrong_decisions_are_said_and_fail(study: Report) -> None:
    assert "WRONG: 3 decisions flipped outside" in _text(replace(study, wrong=3))


def test_json_round_trip(study: Report, tmp_path: Path) -> None:
    write_record(study, tmp_path / "a.json")
    again = read_record(Report, tmp_path / "a.json", WHAT)
    write_record(again, tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert [x.flips for x in again.rows] == [
        replace(x.flips, low=y.flips.low, high=y.flips.high)
        for x, y in zip(study.rows, again.rows, strict=True)
    ]


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"schema_version": 1, "rows": 3}))
    with pytest.raises(OSError, match="not a precision report"):
        read_record(Report, path, WHAT)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if "src" in found:
            self.sources.append(found["src"] or "")
        if "href" in found:
            self.links.append(found["href"] or "")
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_one_file_with_every_table(study: Report) -> None:
    pytest.importorskip("matplotlib")
    hostile = replace(study, command="pdverify precision --input '<script>&.safetensors'")
    text = page_html(hostile)
    tags = _Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.links == []
    assert tags.sources
    assert all(x.startswith("data:image/png;base64,") for x in tags.sources)
    assert "<script>" not in text
    assert "kl, aggregated tail: decisions by stage and format" in text


def test_page_is_a_function_of_the_json(study: Report, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = write_page(study, tmp_path / "precision.md")
    first = {path.name: path.read_bytes() for path in written}
    assert {"precision.md", RUN, "flips.png", "bounds.png"} <= first.keys()
    again = read_record(Report, tmp_path / "precision" / RUN, WHAT)
    assert {x.name: x.read_bytes() for x in write_page(again, written[-1])} == first


@pytest.mark.parametrize(
    ("flips", "tokens", "verdict"),
    [(0, 200, "no"), (0, 100, "?"), (10, 100, "yes"), (0, 0, "?")],
)
def test_verdict_follows_the_interval(study: Report, flips: int, tokens: int, verdict: str) -> None:
    row = replace(study.rows[0], flips=rate_of(flips, tokens))
    assert precision_tables.verdict([row]) == verdict


def test_a_loose_bound_is_marked() -> None:
    assert precision_tables.is_loose(rate_of(60, 100), rate_of(1, 100))
    assert not precision_tables.is_loose(rate_of(60, 100), rate_of(2, 100))
    assert not precision_tables.is_loose(rate_of(50, 100), rate_of(0, 100))


def test_command_writes_what_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    names = {"--json": "a.json", "--html": "a.html", "--page": "a.md"}
    more = [word for flag, name in names.items() for word in (flag, str(tmp_path / name))]
    assert cli.main([*ARGUMENTS, *more]) == 0
    first = capsys.readouterr().out
    assert all((tmp_path / name).exists() for name in names.values())
    assert cli.main(["precision", "--from", str(tmp_path / "a.json")]) == 0
    assert capsys.readouterr().out == first


def test_a_refuted_certificate_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Estimate, "bound", property(lambda self: self.rounding / 1e3))
    assert cli.main(ARGUMENTS) == 1
    assert "flipped outside their certificates (exit 1)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "bf17"], "unknown number format 'bf17'"),
        (["--stage", "softmax+sofmax"], "unknown stage 'sofmax'"),
        (["--divergence", "k"], "unknown divergence 'k'"),
        (["--input", "peak"], "unknown input family 'peak'"),
        (["--input", "none.safetensors"], "none.safetensors"),
        (["--page", "a.txt"], "ends in .md"),
        (["--vocab", "2"], "not an integer >= 3"),
        (["--json", "/nowhere/a.json"], "/nowhere"),
        (["--stage", "lm-head+rollout", "--input", "flat"], "a rollout runs once"),
        (["--stage", "rollout", "--input", "flat"], "no stage and format fits"),
        (["--stage", "softmax", "--format", "e4m3", "--input", "flat"], "no stage and format fits"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["precision", *arguments]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said
    assert "internal error" not in said


COMMITTED = ROOT / "docs" / "precision"


def test_committed_page_is_that_of_its_run() -> None:
    report = read_record(Report, COMMITTED / RUN, WHAT)
    assert (ROOT / "docs" / "precision.md").read_text() == page(report, "precision")
    assert report.wrong == 0
    assert report.close >= report.decisions / 5
    assert report.decisions >= 10_000_000
    assert report.by_vocab["32768"] >= 100_000
    assert report.by_vocab["151936"] >= 2_000
    assert report.rollouts


def test_committed_figures_come_out_again() -> None:
    report = read_record(Report, COMMITTED / RUN, WHAT)
    options = Options(
        inputs=("peaked",),
        stages=("stored-logits", "softmax"),
        formats=("bf16", "fp16"),
        divergences=("kl",),
        level=report.level,
        seed=report.seed,
        vocab_size=1_000,
        tokens=512,
    )
    again = low_precision.run(options, lambda *_: None)
    assert again.rows
    for row in again.rows:
        key = ("input", "stage", "format", "divergence", "partition", "tail", "vocab_size")
        (same,) = (x for x in report.rows if all(getattr(x, k) == getattr(row, k) for k in key))
        assert same.tokens == row.tokens
        for name in ("sign_flips", "flips", "undecidable", "sign_undecidable"):
            old, new = getattr(same, name), getattr(row, name)
            assert old.low <= new.count / new.total <= old.high, (row.stage, row.format, name)
        assert same.bits_low is not None
        assert same.bits_low - 0.01 <= row.bits <= same.bits_high + 0.01


def test_runs_on_different_inputs_are_one(study: Report) -> None:
    other = replace(
        study,
        rows=tuple(replace(row, input="flat", vocab_size=99) for row in study.rows),
        by_vocab={"99": 7, "64": 1},
        decisions=8,
        close=2,
        wrong=1,
        command="pdverify precision --input flat",
        notes=(),
    )
    both = merged([study, other])
    assert both.rows == study.rows + other.rows
    assert both.forms == study.forms
    assert both.decisions == study.decisions + 8
    assert both.by_vocab == {"64": study.by_vocab["64"] + 1, "99": 7}
    assert both.wrong == study.wrong + 1
    assert both.command == f"{study.command} && {other.command}"
    assert merged([study]) is study


@pytest.mark.parametrize(
    ("change", "message"), [({}, "is in two runs"), ({"level": "full"}, "different level")]
)
def test_runs_that_do_not_belong_together_are_refused(
    study: Report,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, str],
    message: str,
) -> None:
    write_record(study, tmp_path / "a.json")
    write_record(replace(study, **change), tmp_path / "b.json")
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    assert cli.main(["precision", "--from", *files]) == 2
    assert message in capsys.readouterr().err
