"""The adapters without any framework: what they say, and that they pass arguments on rightly."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from pdverify.adapters import ADAPTERS
from pdverify.cli import main
from pdverify.conformance.alternatives import ALTERNATIVES
from pdverify.conformance.options import Options
from pdverify.conformance.target_run import check_target
from pdverify.conformance.targets import load_target
from pdverify.definitions.masks import MASKS
from tests.adapters.fakes import FAKES

CHECKS = (
    "output.form",
    "mask.decisions",
    "mask.thresholds",
    "batch.padding",
    "loss.gradient",
    "loss.cap",
    "loss.aggregation",
)
"""Enough to notice an argument in another's place."""


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No framework is installed, whatever the environment holds."""
    for _, adapter in ADAPTERS.items():
        monkeypatch.setitem(sys.modules, adapter.framework.imports, None)  # type: ignore[arg-type]


def _options(arguments: tuple[str, ...]) -> dict[str, Any]:
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    named = {flag.removeprefix("--").replace("-", "_"): value for flag, value in pairs}
    return {k: float(v) if k == "ratio_cap" else v for k, v in named.items()}


def _judged_as(name: str, **more: Any) -> Options:
    adapter = ADAPTERS[name]
    return Options(mask=adapter.mask, **_options(adapter.options), **more)


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_entry_is_complete(name: str) -> None:
    adapter = ADAPTERS[name]
    assert name.startswith(f"{adapter.framework.name}/")
    assert adapter.mask in MASKS
    assert adapter.function.startswith(f"{adapter.framework.imports}.")
    assert adapter.file.partition("/")[0] == adapter.framework.imports
    assert adapter.settings
    assert adapter.framework.notes
    assert adapter.framework.version[0].isdigit()
    assert all("==" in requirement for requirement in adapter.framework.requirements)
    target = load_target(adapter.target)
    assert target.differentiates == "logprobs"
    named = {convention for pair in adapter.read_as for convention in pair}
    assert named <= {None, *ALTERNATIVES}
    _judged_as(name)


def test_adapters_import_neither_torch_nor_a_framework() -> None:
    names = sorted({adapter.framework.imports for _, adapter in ADAPTERS.items()} | {"torch"})
    script = f"import sys, pdverify.adapters; print([n for n in {names!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.usefixtures("absent")
def test_a_missing_framework_says_what_to_install(name: str) -> None:
    import torch

    adapter = ADAPTERS[name]
    target = load_target(adapter.target)
    given = {parameter: torch.zeros(1, 2) for parameter in target.parameters}
    given["response_mask"] = torch.ones(1, 2, dtype=torch.bool)
    wanted = f"{adapter.framework.imports} is not installed: pip install {adapter.framework.pin}"
    with pytest.raises(ImportError, match=wanted):
        target.function(**given)


@pytest.mark.usefixtures("absent")
def test_the_program_ends_with_2_where_the_framework_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    adapter = ADAPTERS["verl/dppo-tv"]
    assert main(["check", adapter.target, "--mask", adapter.mask, *adapter.options]) == 2
    assert "pip install verl==0.9.1" in capsys.readouterr().err


def _install(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    module = FAKES[ADAPTERS[name].framework.name]()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_right_function_behind_an_adapter_conforms(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(monkeypatch, name)
    report = check_target(ADAPTERS[name].target, _judged_as(name, select=CHECKS))
    assert not [(check.id, check.message) for check in report.failed]
    assert report.decisions.determined > 100


@pytest.mark.parametrize("name", ["verl/dppo-tv", "areal/ppo", "trl-dppo/topk-kl", "skyrl/ppo"])
def test_swapped_thresholds_behind_an_adapter_are_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.adapters import fakes

    _install(monkeypatch, name)
    if name == "trl-dppo/topk-kl":
        trainer = sys.modules["trl.experimental.dppo.dppo_trainer"].DPPOTrainer
        original = trainer._compute_divergence_mask

        def swapped(self: Any, *arguments: Any) -> Any:
            self.epsilon_low, self.epsilon_high = self.epsilon_high, self.epsilon_low
            try:
                return original(self, *arguments)
            finally:
                self.epsilon_low, self.epsilon_high = self.epsilon_high, self.epsilon_low

        monkeypatch.setattr(trainer, "_compute_divergence_mask", swapped)
    else:
        right = fakes.drops
        monkeypatch.setattr(
            fakes, "drops", lambda kind, lp, lm, a, low, high: right(kind, lp, lm, a, high, low)
        )
    options = _judged_as(name, select=("mask.decisions", "mask.thresholds"))
    causes = [check.cause for check in check_target(ADAPTERS[name].target, options).failed]
    assert "the thresholds of A > 0 and A < 0 are swapped" in causes
