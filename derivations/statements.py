"""The registry of statements: what is claimed, how it is proved, and the proof to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sympy as sp

Proof = Callable[[], None]


class Refuted(AssertionError):
    """A statement whose proof does not go through."""


@dataclass(frozen=True)
class Statement:
    """One statement.

    Attributes:
        name: stable dotted id, the group first.
        title: what it says, in one line.
        formula: the formula in LaTeX.
        how: the kinds of proof, in words.
        sketch: the proof as prose; every step that SymPy does not take is argued here.
        used: where the project relies on it.
        proof: raises `Refuted` unless the statement holds.
    """

    name: str
    title: str
    formula: str
    how: str
    sketch: str
    used: str
    proof: Proof


STATEMENTS: dict[str, Statement] = {}


def add(
    name: str, title: str, proof: Proof, *, formula: str, how: str, sketch: str, used: str
) -> None:
    """Register a statement; a second one of the same name is an error."""
    if name in STATEMENTS:
        raise ValueError(f"statement {name!r} is registered twice")
    prose = " ".join(sketch.split())
    STATEMENTS[name] = Statement(name, title, formula, how, prose, used, proof)


def statement(
    name: str, title: str, *, formula: str, how: str, used: str
) -> Callable[[Proof], Proof]:
    """Register the decorated proof; its docstring is the sketch."""

    def register(proof: Proof) -> Proof:
        sketch = proof.__doc__ or ""
        add(name, title, proof, formula=formula, how=how, sketch=sketch, used=used)
        return proof

    return register


def require(holds: object, claim: str) -> None:
    """Raise `Refuted` with the claim unless it holds."""
    if not bool(holds):
        raise Refuted(claim)


def require_zero(expression: sp.Expr, claim: str) -> None:
    """Raise `Refuted` unless `expression` is identically zero.

    Logarithms are split into those of irreducible polynomials, which are then independent
    symbols, as are signs; what multiplies each of them (and what is left) is a rational function,
    whose numerator must expand to 0.
    """
    residual = normal_form(expression)
    if residual != 0:
        text = str(residual)
        raise Refuted(f"{claim}: residual {text if len(text) < 200 else text[:200] + '...'}")


def normal_form(expression: sp.Expr) -> sp.Expr:
    """Zero if `expression` is zero identically in its symbols, logarithms and signs.

    A polynomial: the sum of the numerators of what multiplies each logarithm and sign, and of
    the rest.
    """
    expression = sp.sympify(expression)
    expression = expression.replace(sp.log, _split_log)
    expression = expression.replace(sp.sign, _canonical_sign)
    atoms = sorted(expression.atoms(sp.log, sp.sign), key=sp.default_sort_key)
    symbols = {atom: sp.Dummy(f"a{i}", real=True) for i, atom in enumerate(atoms)}
    expression = expression.xreplace(symbols)
    constant = expression.subs(dict.fromkeys(symbols.values(), sp.Integer(0)))
    slopes = {symbol: sp.diff(expression, symbol) for symbol in symbols.values()}
    if any(slope.has(*symbols.values()) for slope in slopes.values()):
        return _numerator(expression)
    linear = sum((a * _numerator(slope) for a, slope in slopes.items()), sp.Integer(0))
    return sp.expand(_numerator(constant) + linear)


def _numerator(expression: sp.Expr) -> sp.Expr:
    return sp.expand(sp.fraction(sp.together(expression))[0])


def _split_log(argument: sp.Expr) -> sp.Expr:
    """log of a positive rational function, as a combination of log |irreducible factor|."""
    terms = []
    for part, weight in zip(sp.fraction(sp.together(argument)), (1, -1), strict=True):
        constant, factors = sp.factor_list(part)
        primes = sp.factorint(abs(constant)).items()
        terms += [weight * power * sp.log(factor) for factor, power in (*primes, *factors)]
    return sum(terms, sp.Integer(0))


def _canonical_sign(argument: sp.Expr) -> sp.Expr:
    """sign of a fraction with positive denominator as plus or minus the sign of its numerator."""
    numerator = sp.expand(sp.fraction(sp.together(argument))[0])
    if numerator.is_number:
        return sp.sign(numerator)
    if numerator.could_extract_minus_sign():
        return -sp.sign(-numerator, evaluate=False)
    return sp.sign(numerator, evaluate=False)
