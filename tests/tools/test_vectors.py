"""The vectors: certain digits, one answer whatever the witness, files that can be trusted."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flint import arb

from pdverify.batch import Batch, InputError
from pdverify.cases import EDGE_CASES
from pdverify.definitions import masks
from pdverify.definitions.cells import build
from pdverify.definitions.divergences import DIVERGENCES
from pdverify.definitions.masks import MASKS
from pdverify.formats import FORMATS
from pdverify.oracle.arb_balls import precision
from pdverify.rules import Rule
from pdverify.tools.vectors import compare_vectors, folder, lint_vectors, write_vectors
from pdverify.tools.vectors.digits import certify, decimal_text
from pdverify.tools.vectors.flags import FLAGS
from pdverify.tools.vectors.inputs import EDGE_FLAGS, FAMILY_INPUTS, float_text, inputs
from pdverify.tools.vectors.lint import violations

COMMITTED = Path(__file__).parents[2] / "vectors" / folder.VERSION
MAX_BYTES = 2_500_000


@pytest.fixture(scope="module")
def written() -> dict[str, bytes]:
    return folder.files()


@pytest.fixture(scope="module")
def vectors(written: dict[str, bytes]) -> dict[str, dict[str, Any]]:
    groups = [
        json.loads(data)
        for name, data in written.items()
        if name.endswith(".json") and name not in ("schema.json", "inputs.json")
    ]
    return {vector["id"]: vector for group in groups for vector in group["vectors"]}


@pytest.fixture(scope="module")
def batches() -> dict[str, Batch]:
    return {entry.name: entry.batch for entry in inputs()}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(COMMITTED, tmp_path / "v1"))


@pytest.fixture
def part(copy: Path) -> Path:
    """A copy without most groups: enough to be linted, and quick."""
    for path in copy.glob("*-*.json"):
        if path.name not in ("divergence-kl.json", "mask-none.json"):
            path.unlink()
    return copy


def binding(vector: dict[str, Any]) -> list[int]:
    """Tokens that are not informative."""
    free = {
        t
        for entry in vector["exceptions"]
        if entry["result"] == "informative"
        for t in entry["tokens"]
    }
    return [t for t in range(len(vector["expected"])) if t not in free]


def test_committed_files_are_what_is_written_now(written: dict[str, bytes]) -> None:
    assert sorted(path.name for path in COMMITTED.iterdir() if path.is_file()) == sorted(written)
    for name, data in written.items():
        assert (COMMITTED / name).read_bytes() == data, name


def test_committed_files_have_no_lint() -> None:
    assert lint_vectors(COMMITTED) == []


def test_size_and_newlines(written: dict[str, bytes]) -> None:
    assert sum(map(len, written.values())) <= MAX_BYTES
    texts = [data for name, data in written.items() if not name.endswith(".safetensors")]
    assert all(b"\r" not in text and text.endswith(b"\n") for text in texts)


def test_every_divergence_view_and_tail_is_covered(vectors: dict[str, dict[str, Any]]) -> None:
    seen = {
        (v["quantity"], v["parameters"].get("divergence"), v["view"], v["parameters"].get("tail"))
        for v in vectors.values()
        if binding(v)
    }
    for name in DIVERGENCES:
        for view, tails in {"full": (None,), "topk": ("aggregated", "uniform", "exact")}.items():
            assert ("divergence", name, view, None) in seen
            assert all(("coefficient", name, view, tail) in seen for tail in tails)


def test_every_mask_is_covered_with_both_decisions(vectors: dict[str, dict[str, Any]]) -> None:
    for name, mask in MASKS.items():
        for view in mask.views():
            for tail in masks.TAILS if mask.needs_tail(view) else (None,):
                answers = {
                    (v["id"].rsplit("/", 1)[1], v["expected"][t])
                    for v in vectors.values()
                    if v["id"].startswith(f"mask-{name}/")
                    and v["parameters"].get("tail") == tail
                    and v["view"] == view
                    for t in binding(v)
                }
                both = {False, True} if mask.direction != "none" else {True}
                wanted = {(limits, keep) for limits in ("default", "uneven") for keep in both}
                assert answers == wanted, (name, view, tail)


def test_every_flag_is_used_and_every_input_known(vectors: dict[str, dict[str, Any]]) -> None:
    assert {flag for v in vectors.values() for flag in v["flags"]} == set(FLAGS)
    assert set(EDGE_FLAGS) <= set(EDGE_CASES)
    names = {entry.name for entry in inputs()}
    assert {f"edge/{name}" for name in EDGE_CASES} <= names
    assert {f"family/{name}" for name in FAMILY_INPUTS} <= names


def test_conventions_name_the_others() -> None:
    for name, flag in FLAGS.items():
        assert (flag.bug_class == "convention") == (flag.convention is not None), name
        assert bool(flag.others) == (flag.convention is not None), name


def test_known_values_agree_with_the_oracle(
    vectors: dict[str, dict[str, Any]], batches: dict[str, Batch]
) -> None:
    """mpmath at 50 digits and balls at 256 bits write the same 40 digits."""
    rights = [
        (name, right)
        for name, case in EDGE_CASES.items()
        for right in case.right
        if right.quantity in ("divergence", "coefficient")
    ]
    for name, right in rights:
        variant = right.partition
        if right.quantity == "coefficient" and right.tail is not None:
            variant += f"-{right.tail}"
        place = f"divergence-{right.divergence}/edge/{name}/{right.quantity}/{variant}"
        vector = vectors[place]
        loose = {t for e in vector["exceptions"] if e["why"] == "mass-not-one" for t in e["tokens"]}
        for t, value in enumerate(right.values):
            text = value if value == "inf" else decimal_text(Decimal(value))
            if t not in loose or right.quantity == "divergence":
                assert vector["expected"][t] == text, place
                continue
            # the expression takes sum mu for 1: it is off by (sum mu - 1) (pi_k - sum pi^2)
            cells = build(batches[vector["input"]].rows(), right.partition)
            excess = abs(cells.mu[t].sum() + cells.mu_tail[t] - 1)
            assert abs(Decimal(vector["expected"][t]) - Decimal(value)) <= Decimal(2 * excess)


def test_definitions_meet_every_value(
    vectors: dict[str, dict[str, Any]], batches: dict[str, Batch]
) -> None:
    """A second witness, in float64: conventions as well."""
    unit, judged = FORMATS["fp64"].unit_roundoff, 0
    for place, vector in vectors.items():
        options, tokens = vector["parameters"], binding(vector)
        if vector["quantity"] not in ("divergence", "coefficient") or not tokens:
            continue
        rows = batches[vector["input"]].rows()
        with np.errstate(all="ignore"):
            cells = build(rows, vector["view"], options.get("support", "append"))
            if vector["quantity"] == "divergence":
                got = masks.divergence(cells, options["divergence"])
            else:
                got = masks.coefficient(cells, options["divergence"], options.get("tail"))
        for t in tokens:
            error = abs(got[t] - float.fromhex(vector["nearest"][t]))
            assert error <= vector["budget_per_unit"][t] * unit, (place, t)
            judged += 1
    assert judged


def test_definitions_meet_every_decision(
    vectors: dict[str, dict[str, Any]], batches: dict[str, Batch]
) -> None:
    judged = 0
    for place, vector in vectors.items():
        if vector["quantity"] != "keep":
            continue
        options = {
            name: float.fromhex(x) if isinstance(x, str) and x.startswith("0x") else x
            for name, x in vector["parameters"].items()
        }
        rule = Rule(partition=vector["view"], **options)
        with np.errstate(all="ignore"):
            got = masks.keep(batches[vector["input"]].rows(), rule)
        for t in binding(vector):
            assert got[t] == vector["expected"][t], (place, t)
            judged += 1
    assert judged


def test_digits_are_rounded_once_and_only_when_certain() -> None:
    with precision(256):
        sharp = certify(arb("0.1"))
    assert sharp is not None
    assert (sharp.decimal, sharp.nearest) == ("1e-1", 0.1)
    assert certify(arb(1, 1e-30)) is None
    assert certify(arb(0, 1e-300)) is None
    assert certify(arb("inf")) is None
    huge = certify(arb(2) ** 1100)
    assert huge is not None
    assert (huge.nearest, huge.why) == (float("inf"), "overflow")
    assert decimal_text(Decimal("0.00012500")) == "1.25e-4"
    assert decimal_text(Decimal("-" + "9" * 41)) == "-1e+41"


@pytest.mark.parametrize("x", [0.0, -0.0, 1.0, -1.5, 2.0**-149, float("inf"), float("-inf")])
def test_hexadecimal_is_exact(x: float) -> None:
    back = float.fromhex(float_text(x))
    assert (back, np.signbit(back)) == (x, np.signbit(x))
    assert np.isnan(float.fromhex(float_text(float("nan"))))


def run_reader(place: Path, change: Callable[[str], str] = str) -> subprocess.CompletedProcess[str]:
    """The reader, alone: isolated, and with this package made unimportable."""
    script = place / "read_vectors.py"
    script.write_text(change(script.read_text()))
    code = "import runpy, sys; sys.modules['pdverify'] = None; runpy.run_path(sys.argv[1])"
    return subprocess.run(
        [sys.executable, "-I", "-c", code, str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_the_reader_is_short_and_needs_numpy_alone() -> None:
    text = (COMMITTED / "read_vectors.py").read_text()
    assert len(text.splitlines()) <= 40
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
    }
    assert imported - set(sys.stdlib_module_names) == {"numpy"}


def test_the_reader_passes_every_required_vector(
    copy: Path, vectors: dict[str, dict[str, Any]], batches: dict[str, Batch]
) -> None:
    done = run_reader(copy)
    assert (done.returncode, done.stderr) == (0, "")
    verdicts = [line.split() for line in done.stdout.splitlines()]
    assert {verdict for verdict, _, _ in verdicts} == {"pass"}
    groups = [f"{kind}-{name}/" for kind in ("divergence", "mask-predictive") for name in DUAL]
    groups += [f"mask-dppo-{view}-{name}/" for view in ("binary", "topk") for name in DUAL]
    expected = {
        (place, str(t))
        for place, v in vectors.items()
        if place.startswith(tuple(groups))
        and v["result"] == "required"
        and batches[v["input"]].logits is not None
        for t in range(len(v["expected"]))
        if not any(t in entry["tokens"] for entry in v["exceptions"])
    }
    assert {(place, t) for _, place, t in verdicts} == expected


DUAL = ("kl", "tv")
"""The divergences that the reader computes."""


def test_plain_float32_stays_within_the_budgets(copy: Path) -> None:
    """The same formulas in the format of the arrays, judged by its unit roundoff."""

    def narrow(text: str) -> str:
        text = text.replace('(s["values"])', '(s["values"]).astype(s["dtype"])')
        return text.replace("2**-53", "2**-24")

    done = run_reader(copy, narrow)
    assert done.stdout.count("pass") > 1000
    assert (done.returncode, done.stderr, "FAIL" in done.stdout) == (0, "", False)


WRONG = {
    "arguments swapped": ("mu * (lm - lp)", "pi * (lp - lm)"),
    "no half in total variation": ("abs(mu - pi).sum() / 2", "abs(mu - pi).sum()"),
    "direction of the ratio": ('(c if p.get("direction") == "predictive" else', "(0 * c +"),
    "aggregated tail": ("(tail**2).sum() / (tail.sum() or 1)", "tail.sum()"),
    "no tail": ("(max(0, 1 - np.exp(lm).sum()) if tail.size else 0)", "(0)"),
    "sampled token forgotten": ("kept = {", "kept = top or {"),
    "thresholds swapped": ("if a > 0 else", "if a < 0 else"),
    "advantage ignored": ("np.sign(a) *", "1 *"),
    "one criterion only": ("d <= delta or push <= 0", "d <= delta"),
    "tail floored": ("np.log(tail.sum())", "np.log(tail.sum() + 1e-3)"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_the_reader_fails_a_wrong_implementation(copy: Path, fault: str) -> None:
    old, new = WRONG[fault]
    assert old in (copy / "read_vectors.py").read_text()
    done = run_reader(copy, lambda text: text.replace(old, new))
    assert done.returncode == 1
    assert "FAIL" in done.stdout


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite a JSON file after `change`, in the layout of the writer."""
    data = json.loads(path.read_text())
    change(data)
    key = "inputs" if data["kind"] == "inputs" else "vectors"
    body = data.pop(key)
    path.write_bytes(folder._lines(data, key, body))


def first(data: dict[str, Any], **wanted: Any) -> dict[str, Any]:
    """The first vector whose fields are as wanted and that has no exceptions."""
    return next(
        v
        for v in data["vectors"]
        if not v["exceptions"] and all(v[name] == value for name, value in wanted.items())
    )


def other_value(data: dict[str, Any]) -> None:
    vector = first(data, quantity="coefficient", view="topk", result="required")
    wrong = -Decimal(vector["expected"][0])
    vector["expected"][0] = decimal_text(wrong)
    vector["nearest"][0] = float_text(float(wrong))


def other_decision(data: dict[str, Any]) -> None:
    vector = first(data, result="required")
    vector["expected"][0] = not vector["expected"][0]


def other_input(data: dict[str, Any]) -> None:
    values = data["inputs"]["edge/no-tail-term"]["arrays"]["logits"]["values"]
    values[0], values[1] = values[1], values[0]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("divergence-kl.json", other_value),
        ("mask-predictive-kl.json", other_decision),
        ("mask-dppo-binary-tv.json", other_decision),
        ("inputs.json", other_input),
    ],
)
def test_a_corrupted_vector_fails_and_is_found(
    copy: Path,
    written: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    change: Callable[[dict[str, Any]], None],
) -> None:
    edit(copy / name, lambda data: None)
    assert (copy / name).read_bytes() == (COMMITTED / name).read_bytes()
    edit(copy / name, change)
    done = run_reader(copy)
    assert done.returncode == 1
    assert "FAIL" in done.stdout
    monkeypatch.setattr(folder, "files", lambda: written)
    assert [problem.split(":")[0] for problem in compare_vectors(copy)] == [name]


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["vectors"][0].pop(name)


def put(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["vectors"][0].update({name: value})


LINT: dict[str, tuple[str, Callable[[dict[str, Any]], None], str]] = {
    "missing field": ("divergence-kl.json", drop("flags"), "flags is missing"),
    "unknown field": ("divergence-kl.json", put("remark", ""), "remark is unknown"),
    "wrong type": ("divergence-kl.json", put("expected", "0"), "is no array"),
    "not a decimal": ("divergence-kl.json", put("expected", ["0.10"]), "does not match"),
    "unknown result": ("divergence-kl.json", put("result", "maybe"), "is none of"),
    "unknown input": ("divergence-kl.json", put("input", "edge/nothing"), "no input edge/nothing"),
    "flag without a note": ("divergence-kl.json", put("flags", ["Novel"]), "has no note"),
    "repeated flag": ("divergence-kl.json", put("flags", ["Basic"] * 2), "is repeated"),
    "foreign id": ("divergence-kl.json", put("id", "loss/a"), "does not begin with its group"),
    "id twice": (
        "divergence-kl.json",
        lambda data: data["vectors"].insert(0, data["vectors"][0]),
        "is used 2 times",
    ),
    "not sorted": (
        "divergence-kl.json",
        lambda data: data["vectors"].reverse(),
        "not sorted by id",
    ),
    "wrong float64": (
        "divergence-kl.json",
        put("nearest", ["0x1.8p+0"]),
        "is not the float64 nearest",
    ),
    "too many values": (
        "mask-none.json",
        put("expected", [True] * 9),
        "9 values for",
    ),
    "unknown decision": ("mask-none.json", put("expected", [None]), "binds nobody"),
    "any error allowed": ("divergence-kl.json", put("budget_per_unit", [None]), "any error"),
    "token out of range": (
        "mask-none.json",
        put("exceptions", [{"result": "informative", "tokens": [7], "why": "overflow"}]),
        "out of range",
    ),
    "unnamed convention": ("mask-none.json", put("result", "convention"), "without a flag"),
    "link elsewhere": (
        "divergence-kl.json",
        lambda data: data["flags"]["Basic"]["links"].append("http://example.org"),
        "does not match",
    ),
    "group renamed": (
        "divergence-kl.json",
        lambda data: data.update(group="other"),
        "but the file is divergence-kl",
    ),
    "array too short": (
        "inputs.json",
        lambda data: data["inputs"]["edge/no-tail-term"]["arrays"]["logits"]["values"].pop(),
        "1 values, shape",
    ),
    "vocabulary of another size": (
        "inputs.json",
        lambda data: data["inputs"]["edge/no-tail-term"].update(vocab_size=3),
        "vocab_size 3",
    ),
    "no such tensor": (
        "inputs.json",
        lambda data: data["inputs"]["large/peaked"]["arrays"]["logits"].update(tensor="x"),
        "has no such tensor",
    ),
    "unused input": (
        "inputs.json",
        lambda data: data["inputs"].update({"edge/extra": data["inputs"]["edge/no-tail-term"]}),
        "edge/extra is used by no vector",
    ),
}


@pytest.mark.parametrize("fault", LINT)
def test_lint_finds(part: Path, fault: str) -> None:
    name, change, message = LINT[fault]
    assert not any(message in problem for problem in lint_vectors(part))
    edit(part / name, change)
    problems = lint_vectors(part)
    assert any(message in problem for problem in problems), problems
    assert all(len(problem) < 500 for problem in problems)


def test_lint_of_unreadable_and_foreign_files(copy: Path) -> None:
    (copy / "loss.json").write_bytes(b"{")
    (copy / "mask-none.json").write_text('{"a": 1, "a": 2}')
    (copy / "notes.txt").write_text("")
    (copy / "large.safetensors").write_bytes(b"")
    problems = " ".join(lint_vectors(copy))
    for message in (
        "loss.json: not readable as JSON",
        "'a' is there twice",
        "notes.txt: unknown file",
        "has no such tensor",
    ):
        assert message in problems
    (copy / "inputs.json").unlink()
    assert any("inputs.json: not readable" in problem for problem in lint_vectors(copy))
    assert lint_vectors(copy / "nowhere") == [f"{copy / 'nowhere'}: no such folder"]
    assert compare_vectors(copy / "nowhere") == [f"{copy / 'nowhere'}: no such folder"]


def test_schema_in_a_reference_validator() -> None:
    """The linter's reading of the schema is that of the specification."""
    jsonschema = pytest.importorskip("jsonschema", reason="a second reading of the schema")
    schema = json.loads((COMMITTED / "schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for path in COMMITTED.glob("*.json"):
        if path.name == "schema.json":
            continue
        data = json.loads(path.read_text())
        assert validator.is_valid(data), path.name
        if data["kind"] == "vectors":
            one = data["vectors"][0]
            for name in one:
                broken = {**data, "vectors": [{**one, name: {"unheard": "of"}}]}
                assert not validator.is_valid(broken)
                assert violations(broken, "#/$defs/vectors", schema)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Two small files instead of all, so that writing is tested without computing."""
    content = {"a.json": b"{}\n", "b.bin": b"\0\1"}
    monkeypatch.setattr(folder, "files", lambda: content)
    return content


def test_writing_whole_or_not_at_all(
    tmp_path: Path, quick: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "v1"
    assert write_vectors(target) == [target / "a.json", target / "b.bin"]
    assert compare_vectors(target) == []
    with pytest.raises(InputError, match=r"folder = .*holds a\.json; overwrite is not set"):
        write_vectors(target)
    (target / "a.json").write_text("old")
    write_vectors(target, overwrite=True)
    assert (target / "a.json").read_bytes() == quick["a.json"]
    with pytest.raises(InputError, match="its parent folder does not exist"):
        write_vectors(tmp_path / "no" / "v1")
    with pytest.raises(InputError, match="is a file"):
        write_vectors(target / "a.json", overwrite=True)

    def full_disk(self: Path, data: bytes) -> int:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_vectors(tmp_path / "v2")
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]


def test_comparing_says_where(tmp_path: Path, quick: dict[str, bytes]) -> None:
    target = tmp_path / "v1"
    write_vectors(target)
    (target / "a.json").write_bytes(b"{ }\n")
    (target / "b.bin").write_bytes(b"\0\2")
    (target / "c.json").write_bytes(b"")
    assert compare_vectors(target) == [
        "c.json: not written any more",
        "a.json:1: '{ }' is there, '{}' is written now",
        "b.bin: differs from byte 1 on (2 and 2 bytes)",
    ]
    (target / "b.bin").unlink()
    assert "b.bin: missing" in compare_vectors(target)
