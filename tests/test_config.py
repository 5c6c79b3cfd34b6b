"""Options from pyproject.toml and the environment: found, ranked, and named when wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdverify.config import ConfigError, Kind, Setting, read_config

FLAGS: dict[str, Kind] = {
    "target": "value",
    "mask": "value",
    "delta": "value",
    "top-k": "value",
    "select": "values",
    "accept": "values",
    "no-neg-inf": "switch",
}


def _write(folder: Path, table: str, name: str = "[tool.pdverify]") -> Path:
    path = folder / "pyproject.toml"
    path.write_text(f"[project]\nname = 'x'\n{name}\n{table}")
    return path


def test_every_kind_of_value(tmp_path: Path) -> None:
    table = """
        target = "masks:keep"
        mask = "predictive-kl"
        delta = 0.25
        top_k = 5
        select = ["mask.*", "size.*"]
        accept = "ratio-gradient"
        no-neg-inf = true
    """
    path = _write(tmp_path, table)
    found = read_config(tmp_path, {}, FLAGS)
    assert {name: setting.values for name, setting in found.items()} == {
        "target": ("masks:keep",),
        "mask": ("predictive-kl",),
        "delta": ("0.25",),
        "top-k": ("5",),
        "select": ("mask.*", "size.*"),
        "accept": ("ratio-gradient",),
        "no-neg-inf": (),
    }
    assert found["top-k"].origin == f"{path}: [tool.pdverify] top_k"


def test_the_nearest_file_counts(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    _write(tmp_path, "mask = 'outer'")
    assert read_config(inner, {}, FLAGS)["mask"].values == ("outer",)
    _write(tmp_path / "a", "mask = 'inner'")
    assert read_config(inner, {}, FLAGS)["mask"].values == ("inner",)
    _write(tmp_path / "a", "", "[tool.other]")
    assert read_config(inner, {}, FLAGS) == {}


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    path = _write(tmp_path, "mask = 'file'\ndelta = 0.5")
    environ = {
        "PDVERIFY_MASK": "environment",
        "PDVERIFY_SELECT": "mask.*  size.*",
        "PDVERIFY_TOP_K": "7",
        "PDVERIFY_TRACEBACK": "1",
        "PATH": "/bin",
    }
    assert read_config(tmp_path, environ, FLAGS) == {
        "mask": Setting(("environment",), "PDVERIFY_MASK"),
        "delta": Setting(("0.5",), f"{path}: [tool.pdverify] delta"),
        "select": Setting(("mask.*", "size.*"), "PDVERIFY_SELECT"),
        "top-k": Setting(("7",), "PDVERIFY_TOP_K"),
    }


@pytest.mark.parametrize(
    ("text", "on"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("", False)]
)
def test_switches_of_the_environment(tmp_path: Path, text: str, on: bool) -> None:
    found = read_config(tmp_path, {"PDVERIFY_NO_NEG_INF": text}, FLAGS)
    assert ("no-neg-inf" in found) is on


def test_a_switch_that_is_off(tmp_path: Path) -> None:
    _write(tmp_path, "no-neg-inf = false")
    assert read_config(tmp_path, {}, FLAGS) == {}


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ("maks = 'x'", "[tool.pdverify] maks: unknown option 'maks'; did you mean mask"),
        ("qqq = 'x'", "unknown option 'qqq'; known: target, mask"),
        ("top-k = 1\ntop_k = 2", "given twice"),
        ("mask = ['x']", "mask = ['x']: expected text or a number"),
        ("mask = true", "mask = True: expected text or a number"),
        ("select = [['x']]", "expected text, a number or a list of them"),
        ("no-neg-inf = 'yes'", "no-neg-inf = 'yes': expected true or false"),
        ("mask = ", "not TOML"),
    ],
)
def test_the_file_and_the_key_are_named(tmp_path: Path, table: str, why: str) -> None:
    path = _write(tmp_path, table)
    with pytest.raises(ConfigError) as caught:
        read_config(tmp_path, {}, FLAGS)
    assert str(caught.value).startswith(f"{path}: ")
    assert why in str(caught.value)


def test_no_table_at_all(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool]\npdverify = 3")
    with pytest.raises(ConfigError, match=r"tool\.pdverify is no table"):
        read_config(tmp_path, {}, FLAGS)
    (tmp_path / "pyproject.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not TOML"):
        read_config(tmp_path, {}, FLAGS)


@pytest.mark.parametrize(
    ("key", "text", "why"),
    [
        ("PDVERIFY_MAKS", "x", "PDVERIFY_MAKS: unknown option 'maks'; did you mean mask"),
        ("PDVERIFY_NO_NEG_INF", "maybe", "PDVERIFY_NO_NEG_INF = 'maybe': expected 1 or 0"),
    ],
)
def test_the_variable_is_named(tmp_path: Path, key: str, text: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(tmp_path, {key: text}, FLAGS)
    assert why in str(caught.value)
