"""The derivations: generated files are current, the code is right, wrong formulas are refuted."""

from __future__ import annotations

import dataclasses
from typing import Any

import mpmath
import numpy as np
import pytest
import sympy as sp

from derivations import __main__ as command
from derivations import coarse, coefficients, emit, exact, limits, rounding
from derivations.divergences import DIVERGENCES, MU, PI, Divergence, T
from derivations.statements import STATEMENTS, Refuted
from pdverify.definitions import _formulas

ROWS = {row.name: row for row in DIVERGENCES}
UNIT = 2.0**-53


def test_generated_files_are_current() -> None:
    assert command.stale() == []


def test_stale_file_is_found(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "old.py"
    path.write_text("old")
    monkeypatch.setattr(command, "generated", lambda: {path: "new"})
    assert command.stale() == [path]


def test_every_name_in_the_code_is_a_statement() -> None:
    named = set()
    for line in emit.formulas_text().splitlines():
        if "Source:" in line or line.startswith("    arXiv"):
            named |= set(line.split("`")[1::2])
    assert named
    assert named <= set(STATEMENTS)


@pytest.mark.parametrize("name", ["motion", "coefficient.kl", "coarse.ends"])
def test_check_exits_zero(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["check", "--only", name]) == 0
    assert "proved" in capsys.readouterr().out


def test_check_exits_two_on_an_unknown_statement(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["check", "--only", "no.such"]) == 2
    assert "coefficient.kl" in capsys.readouterr().err


def test_check_exits_one_and_names_the_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong() -> None:
        raise Refuted("planted")

    planted = dataclasses.replace(STATEMENTS["motion.rate"], proof=wrong)
    monkeypatch.setitem(STATEMENTS, "motion.rate", planted)
    assert command.main(["check", "--only", "motion.rate"]) == 1
    assert "FAILED motion.rate: planted" in capsys.readouterr().out


def dyadic(rng: np.random.Generator, size: int) -> np.ndarray[Any, Any]:
    """A policy of multiples of 2 ** -20 that sums to 1 exactly."""
    whole = 2**20
    weights = rng.dirichlet(np.full(size, 0.7))
    counts = 1 + np.floor(weights * (whole - size)).astype(np.int64)
    counts[np.argmax(counts)] += whole - counts.sum()
    return counts / whole


def relative_entropy(a: list[Any], b: list[Any]) -> Any:
    return sum(x * mpmath.log(x / y) for x, y in zip(a, b, strict=True))


TEXTBOOK: dict[str, Any] = {
    "kl": relative_entropy,
    "reverse-kl": lambda mu, pi: relative_entropy(pi, mu),
    "tv": lambda mu, pi: sum(abs(p - m) for m, p in zip(mu, pi, strict=True)) / 2,
    "jensen-shannon": lambda mu, pi: (
        (
            relative_entropy(mu, [(m + p) / 2 for m, p in zip(mu, pi, strict=True)])
            + relative_entropy(pi, [(m + p) / 2 for m, p in zip(mu, pi, strict=True)])
        )
        / 2
    ),
    "squared-hellinger": lambda mu, pi: (
        1 - sum(mpmath.sqrt(m * p) for m, p in zip(mu, pi, strict=True))
    ),
    "chi2": lambda mu, pi: sum((m - p) ** 2 / p for m, p in zip(mu, pi, strict=True)),
    "reverse-chi2": lambda mu, pi: sum((m - p) ** 2 / m for m, p in zip(mu, pi, strict=True)),
}


def divergence(name: str, mu: list[Any], pi: list[Any]) -> Any:
    """D in mpmath: the textbook formula, for a divergence added later sum mu f(pi / mu)."""
    if name in TEXTBOOK:
        return TEXTBOOK[name](mu, pi)
    f = sp.lambdify(T, ROWS[name].f, "mpmath")
    return sum(m * f(p / m) for m, p in zip(mu, pi, strict=True))


def slope(name: str, mu: list[Any], pi: list[Any], k: int, retained: int) -> Any:
    """Central difference in 60 digits of the top-K divergence along the step, cells 0..retained.

    The step 1e-20 leaves an error of order 1e-40, nothing beside float64's.
    """

    def merged(x: list[Any]) -> list[Any]:
        return [*x[:retained], sum(x[retained:])] if retained < len(x) else x

    def after(step: Any) -> Any:
        grown = [p * mpmath.exp(step * (int(j == k) - pi[j])) for j, p in enumerate(pi)]
        whole = sum(grown)
        return divergence(name, merged(mu), merged([x / whole for x in grown]))

    h = mpmath.mpf(10) ** -20
    return (after(h) - after(-h)) / (2 * h)


def allowed(formula: Any, mu: Any, pi: Any, size: int) -> float:
    """Rounding of C in float64.

    Each moment errs by 6 roundings relative to itself and, through the argument of a logarithm, 2
    relative to pi; C sums at most size + 10 roundings of products that add up to at most 4
    times the sum of |h| (|hbar| and |h_k| are below it, the weights below 1).
    """
    moments = np.abs(formula.moment(mu, pi)).sum() + 1
    return float((size + 16) * UNIT * 4 * moments)


@pytest.mark.parametrize("name", _formulas.DIVERGENCES)
def test_coefficient_is_the_directional_derivative(name: str) -> None:
    formula = _formulas.DIVERGENCES[name]
    rng = np.random.default_rng(3)
    with mpmath.workdps(60), np.errstate(all="raise"):
        for size in (2, 5, 9):
            for _ in range(8):
                mu, pi = dyadic(rng, size), dyadic(rng, size)
                if (mu == pi).any():
                    continue
                k = int(rng.integers(size))
                truth = slope(name, [*map(mpmath.mpf, mu)], [*map(mpmath.mpf, pi)], k, size)
                c = formula.coefficient(mu[None], pi[None], mu[k : k + 1], pi[k : k + 1])[0]
                assert abs(c - truth) <= allowed(formula, mu, pi, size)
                h, other = formula.moment(mu, pi), np.arange(size) != k
                none = np.zeros(1)
                arguments = h[k : k + 1], pi[k : k + 1], none, none, none
                complement = _formulas.complement_coefficient(
                    (h * other)[None], (pi * other)[None], *arguments
                )
                assert abs(complement[0] - truth) <= allowed(formula, mu, pi, size)


@pytest.mark.parametrize("name", _formulas.DIVERGENCES)
def test_coarse_coefficient_is_the_directional_derivative(name: str) -> None:
    formula = _formulas.DIVERGENCES[name]
    rng = np.random.default_rng(4)
    with mpmath.workdps(60):
        for _ in range(10):
            size, retained = 9, 4
            mu, pi = dyadic(rng, size), dyadic(rng, size)
            k = int(rng.integers(retained))
            truth = slope(name, [*map(mpmath.mpf, mu)], [*map(mpmath.mpf, pi)], k, retained)
            tail = pi[retained:]
            mu_tail, pi_tail = mu[retained:].sum(keepdims=True), tail.sum(keepdims=True)
            w = _formulas.tail_mean_exact((tail**2).sum(keepdims=True), pi_tail)
            unused = np.zeros(2)
            c = formula.coarse_coefficient(
                np.concatenate([mu[:retained], unused])[None],
                np.concatenate([pi[:retained], unused])[None],
                mu[k : k + 1],
                pi[k : k + 1],
                mu_tail,
                pi_tail,
                w,
            )
            cells = np.append(mu[:retained], mu_tail), np.append(pi[:retained], pi_tail)
            assert abs(c[0] - truth) <= allowed(formula, *cells, size)


@pytest.mark.parametrize("name", _formulas.DIVERGENCES)
def test_no_invalid_operation_at_probability_zero(name: str) -> None:
    formula = _formulas.DIVERGENCES[name]
    mu = np.array([[0.5, 0.5, 0.0, 0.0], [0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0]])
    pi = np.array([[0.25, 0.25, 0.5, 0.0], [0.75, 0.25, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    with np.errstate(all="raise"):
        d = formula.cell(mu, pi).sum(axis=-1)
        c = formula.coefficient(mu, pi, mu[:, 0], pi[:, 0])
        generator = formula.f(np.array([0.0, 1.0, np.inf]))
    assert not np.isnan(d).any()
    assert not np.isnan(c).any()
    assert not np.isnan(generator).any()
    assert d[2] == 0
    assert c[2] == 0
    assert generator[1] == 0
    assert (d >= 0).all()


@pytest.mark.parametrize("name", _formulas.DIVERGENCES)
def test_torch_agrees_with_numpy(name: str) -> None:
    torch = pytest.importorskip("torch")
    formula = _formulas.DIVERGENCES[name]
    rng = np.random.default_rng(5)
    mu, pi = dyadic(rng, 6), dyadic(rng, 6)
    mu[-1] = pi[-2] = 0.0
    arrays = mu[None], pi[None], mu[:1], pi[:1], mu[1:2], pi[1:2], pi[2:3]
    tensors = [torch.from_numpy(x.copy()) for x in arrays]
    expected = formula.coarse_coefficient(*arrays)
    found = formula.coarse_coefficient(*tensors, xp=torch)
    assert found.dtype == torch.float64
    if np.isfinite(expected).all():
        bound = allowed(formula, mu, pi, 6)
        np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=2 * bound)
    else:
        np.testing.assert_array_equal(found.numpy(), expected)
    single = formula.coarse_coefficient(*[x.float() for x in tensors], xp=torch)
    assert single.dtype == torch.float32


@pytest.mark.parametrize("name", ROWS)
def test_wrong_moment_is_refuted(name: str) -> None:
    row: Divergence = dataclasses.replace(ROWS[name], moment=ROWS[name].moment + PI * MU)
    with pytest.raises(Refuted):
        coefficients.prove_definition(row)


@pytest.mark.parametrize("name", ROWS)
def test_wrong_cell_is_refuted(name: str) -> None:
    row: Divergence = dataclasses.replace(
        ROWS[name], cell=ROWS[name].cell * sp.Rational(1001, 1000)
    )
    with pytest.raises(Refuted):
        coefficients.prove_definition(row)


def altered(old: str, new: str) -> dict[str, Any]:
    """The generated code with one formula changed."""
    text = emit.formulas_text()
    assert old in text
    return exact.execute(text.replace(old, new))


@pytest.mark.parametrize("name", ROWS)
def test_wrong_coefficient_is_refuted(name: str) -> None:
    mean = ROWS[name].mean_moment
    if mean is not None and mean[0] == 0:
        code = altered("xp.sum(pi * (mu - pi), axis=-1)", "xp.sum(pi * (pi - mu), axis=-1)")
    else:
        code = altered("hbar * (pi_k - n2)", "hbar * (pi_k + n2)")
    with pytest.raises(Refuted):
        coefficients.prove_coefficient(ROWS[name], code)
    with pytest.raises(Refuted):
        coarse.prove_coarse(ROWS[name], code)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("kl", "math.inf, 0 * pi", "math.inf, pi"),
        ("reverse-kl", "xp.where(pi > 0, math.inf, 0 * pi)", "0 * pi"),
        ("jensen-shannon", "math.log(2) / 2 * pi)", "math.log(2) / 3 * pi)"),
        ("chi2", "-math.inf, pi)", "math.inf, pi)"),
    ],
)
def test_wrong_limit_is_refuted(name: str, old: str, new: str) -> None:
    with pytest.raises(Refuted):
        limits.prove_limits(ROWS[name], altered(old, new))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("motion.rate", "(xp.sum(pi * pi, axis=-1) - pi_k)", "(xp.sum(pi * pi, axis=-1) + pi_k)"),
        ("coefficient.general", "h_k - w * h_tail", "h_k + w * h_tail + h_k"),
        ("coarse.affine", "h_k - w * h_tail", "h_k + w * h_tail"),
        ("coarse.bracket", "w * (mu_tail - pi_tail)", "w * (pi_tail - mu_tail)"),
        ("coarse.ends", "    return pi_tail\n", "    return pi_tail * pi_tail\n"),
        ("coarse.exact", "xp.where(held, collision /", "xp.where(held, collision *"),
        ("binary.direction", "hbar * (pi_k - n2)", "hbar * (n2 - pi_k)"),
        ("stable.complement-kl", "(eps + w) *", "(eps - w) *"),
        ("stable.complement-universal", "shift = pi_k * eps - q", "shift = pi_k * eps + q"),
        ("second-order.kl", "2 * pi_k * pi_k", "pi_k * pi_k"),
        ("second-order.kl-coarse", "mu_tail * (w2 - w * w)", "mu_tail * (w2 + w * w)"),
        (
            "limits.empty-tail",
            "xp.where(cells > 0, cells, 1), 0 *",
            "xp.where(cells > 0, cells, 1), 1 +",
        ),
        (
            "limits.infinite-moments",
            "xp.where(falling > 0, -math.inf",
            "xp.where(rising > 0, -math.inf",
        ),
    ],
)
def test_wrong_shared_formula_is_refuted(
    name: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = altered(old, new)
    monkeypatch.setattr(exact, "formulas", lambda: code)
    with pytest.raises(Refuted):
        STATEMENTS[name].proof()


def test_rounding_bounds_hold() -> None:
    worst = rounding.chunk_ratios(rows=24, size=300, seed=0)
    assert worst
    assert max(worst.values()) <= 1


@pytest.mark.parametrize("offset", [0.0, 4096.0])
def test_rounding_bounds_do_not_see_a_shift(offset: float) -> None:
    z = np.random.default_rng(0).integers(-64, 64, size=(8, 300)) / 8
    here, there = rounding.policy(z), rounding.policy(z + offset)
    np.testing.assert_array_equal(here.reach, there.reach)


def test_lower_precision_breaks_the_rounding_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = rounding.log_softmax

    def in_half_precision(logits: Any) -> Any:
        return honest(logits.astype(np.float16)).astype(np.float32)

    monkeypatch.setattr(rounding, "log_softmax", in_half_precision)
    worst = rounding.chunk_ratios(rows=24, size=300, seed=0)
    assert min(worst[name] for name in ("policy", "plain", "complement", "divergence")) > 1


def test_too_small_judged_budgets_are_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = rounding.budgets

    def small(*arguments: Any) -> Any:
        views = honest(*arguments)
        for judged in (each for view in views for each in view.values()):
            judged.unit /= 1000
            for cached in ("_log_training", "_training", "_behavior", "_others"):
                vars(judged).pop(cached, None)
        return views

    worst = rounding.chunk_ratios(rows=8, size=300, seed=0)
    monkeypatch.setattr(rounding, "experiment", lambda: worst)
    STATEMENTS["rounding.budgets"].proof()
    monkeypatch.setattr(rounding, "budgets", small)
    planted = rounding.chunk_ratios(rows=8, size=300, seed=0)
    judged = [value for name, value in planted.items() if name.startswith("budget of")]
    assert judged
    assert min(judged) > 1
    monkeypatch.setattr(rounding, "experiment", lambda: planted)
    with pytest.raises(Refuted, match="budget"):
        STATEMENTS["rounding.budgets"].proof()


def test_violated_rounding_bound_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "experiment", lambda: {"plain": 1.5})
    with pytest.raises(Refuted, match="plain"):
        STATEMENTS["rounding.plain"].proof()
