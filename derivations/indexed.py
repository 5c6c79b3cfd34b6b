"""Sums over a vocabulary of unspecified size V: linearity, Kronecker deltas, normalization.

SymPy keeps `Sum` closed; `reduce_sums` applies the three rules that the proofs for general V
need, each to SymPy's own `Sum` and `KroneckerDelta` objects:

1. the sum of a sum of terms is the sum of their sums, and factors free of the index come out;
2. a term with KroneckerDelta(i, k) sums to its value at i = k, since 0 <= k < V;
3. sums of the same term under different index names are the same, and the sum of a policy is 1.
"""

from __future__ import annotations

import sympy as sp

V = sp.Symbol("V", integer=True, positive=True)
K = sp.Symbol("k", integer=True, nonnegative=True)
N, J, M = sp.symbols("i j m", integer=True, nonnegative=True)
P = sp.IndexedBase("pi", positive=True, real=True)
Q = sp.IndexedBase("mu", positive=True, real=True)
G = sp.IndexedBase("g", real=True)
Z = sp.IndexedBase("z", real=True)


def total(term: sp.Expr, index: sp.Symbol = N) -> sp.Sum:
    """Sum of `term` over the vocabulary."""
    return sp.Sum(term, (index, 0, V - 1))


def delta(i: sp.Expr, j: sp.Expr) -> sp.Expr:
    """1 where the indices are equal, else 0."""
    return sp.KroneckerDelta(i, j)


def reduce_sums(expression: sp.Expr, policies: tuple[sp.IndexedBase, ...] = (P, Q)) -> sp.Expr:
    """`expression` with every sum reduced by the three rules, expanded."""
    reduced = sp.expand(expression).replace(
        lambda x: isinstance(x, sp.Sum), lambda x: _reduce(x, policies)
    )
    return sp.expand(reduced)


def _reduce(x: sp.Sum, policies: tuple[sp.IndexedBase, ...]) -> sp.Expr:
    index = x.limits[0][0]
    result = sp.Integer(0)
    for term in sp.Add.make_args(sp.expand(x.function)):
        free, bound = term.as_independent(index, as_Add=False)
        deltas = [d for d in bound.atoms(sp.KroneckerDelta) if d.has(index)]
        if deltas:
            first = deltas[0]
            other = first.args[1] if first.args[0] == index else first.args[0]
            rest = (bound.xreplace({first: sp.Integer(1)})).subs(index, other)
            result += free * rest
        elif bound == 1:
            result += free * V
        elif any(bound == policy[index] for policy in policies):
            result += free
        else:
            result += free * total(bound.subs(index, N))
    return result
