"""Input noise: nothing within the radii moves D or C farther than `reach`, and hardly less.

The witness is torch: the definitions of D and C on float64 tensors, and their derivatives by
automatic differentiation.  Whether a bound is broken is the oracle's to say, whose enclosures need
no tolerance.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdverify.batch import InputError, Rows
from pdverify.cases import build
from pdverify.definitions.cells import log_softmax, retained_support
from pdverify.oracle import Judge
from pdverify.precision import boxes, noise
from pdverify.precision.noise import DIVERGENCES, Radii, reach, selection_reach
from pdverify.precision.stages import Setting, prepare, source_of, together

VIEWS = (("full", None), ("topk", "exact"), ("topk", "aggregated"), ("topk", "uniform"))
FAMILIES = ("peaked", "flat", "zipf", "near-equal", "near-one-hot")


def policies(z, y, tokens, top_k: int) -> Rows:
    """Rows of both views, log-probs as the engine of exact logits returns them."""
    log_mu = log_softmax(y)
    ids = np.argsort(-y, axis=-1, kind="stable")[:, :top_k]
    return Rows(
        index=np.stack([np.zeros_like(tokens), np.arange(len(tokens))], axis=1),
        tokens=tokens,
        advantages=np.ones(len(tokens)),
        vocab_size=z.shape[-1],
        logits=z,
        behavior_logits=y,
        logprobs=None,
        behavior_logprobs=np.take_along_axis(log_mu, tokens[:, None], axis=-1)[:, 0],
        topk_ids=ids,
        topk_logprobs=np.take_along_axis(log_mu, ids, axis=-1),
        dtype="fp64",
        logprob_dtype="fp64",
    )


def random_rows(seed: int, size: int, count: int = 6) -> tuple[Rows, Radii]:
    """Policies of all kinds, radii from 2^-20 to 1 nat, some of them zero."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(count, size)) * rng.choice([0.1, 2.0, 8.0], size=(count, 1))
    z[::2, rng.integers(size)] += 12.0
    y = z + rng.normal(size=z.shape) * rng.choice([0.0, 1e-4, 0.3, 2.0], size=(count, 1))
    tokens = np.array([rng.choice(size, p=np.exp(row)) for row in log_softmax(y)])
    if seed % 3 == 0 and size > 4:
        dead = (tokens + 1) % size
        z[np.arange(count), dead] = y[np.arange(count), dead] = -np.inf
    rows = policies(z, y, tokens, int(rng.integers(1, size)))

    def radius(shape):
        scale = 2.0 ** rng.integers(-20, 1, size=(count,) + (1,) * (len(shape) - 1))
        return scale * rng.random(shape) * (rng.random(shape) < 0.8)

    listed, sampled = radius(rows.topk_logprobs.shape), radius((count,))
    return rows, Radii(radius(z.shape), radius(z.shape), listed, sampled)


def stored(family: str, stage: str, number_format: str, size: int, count: int = 32):
    """Rows as they are stored and radii that hold the exact ones."""
    batch = build(family, 0, sequences=count // 16, length=16, vocab_size=size, dtype="fp32")
    found = prepare(source_of(family, batch), together(stage, number_format))
    return found.rows, found.radii


def _sizes(rows: Rows, radii: Radii, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Radii of the training logits, and of behavior logits or of the retained log-probs."""
    none = np.zeros(rows.logits.shape)
    z = none if radii.logits is None else np.where(np.isneginf(rows.logits), 0, radii.logits)
    if part == "full":
        y = radii.behavior_logits
        return z, none if y is None else np.where(np.isneginf(rows.behavior_logits), 0, y)
    _, log_mu = retained_support(rows)
    y = np.zeros_like(log_mu)
    if radii.logprobs is not None:
        y[:, :-1] = radii.logprobs
    if radii.sampled is not None:
        y[:, -1] = radii.sampled
    return z, np.where(np.isneginf(log_mu), 0.0, y)


def displaced(rows: Rows, part: str, dz: np.ndarray, dy: np.ndarray) -> Rows:
    """The rows moved; log-probs of policies stay at or below 0."""
    if part == "full":
        return replace(rows, logits=rows.logits + dz, behavior_logits=rows.behavior_logits + dy)
    listed = np.minimum(rows.topk_logprobs + dy[:, :-1], 0.0)
    own = rows.topk_ids == rows.tokens[:, None]
    alone = np.minimum(rows.behavior_logprobs + dy[:, -1], 0.0)
    sampled = np.where(own.any(-1), np.where(own, listed, 0.0).sum(-1), alone)
    return replace(rows, logits=rows.logits + dz, topk_logprobs=listed, behavior_logprobs=sampled)


class Witness:
    """D and C of one divergence and view as functions of what is stored, in torch."""

    def __init__(self, rows: Rows, radii: Radii, name: str, part: str, tail: str | None) -> None:
        self.rows, self.name, self.part, self.tail = rows, name, part, tail
        sizes = _sizes(rows, radii, part)
        self.rz, self.ry = (torch.tensor(x) for x in sizes)
        self.z, self.k = torch.tensor(rows.logits), torch.tensor(rows.tokens)
        if part == "full":
            self.y = torch.tensor(rows.behavior_logits)
            return
        ids, y = retained_support(rows)
        used = ~np.isneginf(y)
        self.y = torch.tensor(np.where(used, y, 0.0))
        outside = np.ones(rows.logits.shape, dtype=bool)
        row = np.broadcast_to(np.arange(len(ids))[:, None], ids.shape)
        outside[row[used], ids[used]] = False
        self.ids, self.used, self.outside = (torch.tensor(x) for x in (ids, used, outside))

    def __call__(self, dz: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """D and C, `[T]` each, moved by `dz` and `dy`."""
        cells = self._full if self.part == "full" else self._listed
        mu, pi, log_mu, log_pi, v = cells(torch.log_softmax(self.z + dz, -1), self.y + dy)
        both = (mu > 0) & (pi > 0)
        one = torch.ones_like(mu)
        m, p = torch.where(both, mu, one), torch.where(both, pi, one)
        ratio = torch.where(both, log_pi, 0.0) - torch.where(both, log_mu, 0.0)
        share, slope = {
            "kl": (-m * ratio, -m / p),
            "reverse-kl": (p * ratio, ratio),
            "tv": ((p - m).abs() / 2, torch.sign(p - m) / 2),
        }[self.name]
        return (
            torch.where(both, share, 0.0).sum(-1),
            (torch.where(both, slope, 0.0) * v).sum(-1),
        )

    def _full(self, log_pi, y):
        log_mu = torch.log_softmax(y, -1)
        pi = log_pi.exp()
        own = torch.nn.functional.one_hot(self.k, pi.shape[-1])
        pi_k, n2 = (pi * own).sum(-1, keepdim=True), (pi * pi).sum(-1, keepdim=True)
        return log_mu.exp(), pi, log_mu, log_pi, pi * (own - pi - pi_k + n2)

    def _listed(self, log_pi, y):
        y = torch.minimum(y, self.y.clamp(min=0.0))
        mu = torch.where(self.used, y.exp(), 0.0)
        mu_t = (1 - mu.sum(-1, keepdim=True)).clamp(min=0.0)
        rest = torch.where(self.outside, log_pi.exp(), 0.0)
        pi_t, x = rest.sum(-1, keepdim=True), (rest * rest).sum(-1, keepdim=True)
        if self.tail != "exact":
            count = self.outside.sum(-1, keepdim=True).clamp(min=1)
            x = pi_t * pi_t / (count if self.tail == "uniform" else 1)
        listed = log_pi.gather(-1, self.ids)
        pi = torch.where(self.used, listed.exp(), 0.0)
        own = (self.ids == self.k[:, None]) & self.used
        pi_k, n2 = (pi * own).sum(-1, keepdim=True), (pi * pi).sum(-1, keepdim=True) + x
        v = torch.cat([pi * (own.double() - pi - pi_k + n2), -x - pi_t * pi_k + pi_t * n2], -1)
        return (
            torch.cat([mu, mu_t], -1),
            torch.cat([pi, pi_t], -1),
            torch.cat([y, mu_t.log()], -1),
            torch.cat([listed, pi_t.log()], -1),
            v,
        )

    def slopes(self, which: int, dz=None, dy=None) -> tuple[torch.Tensor, torch.Tensor]:
        """Derivatives of D (0) or C (1) at a displacement."""
        dz = torch.zeros_like(self.rz) if dz is None else dz
        dy = torch.zeros_like(self.ry) if dy is None else dy
        dz, dy = dz.detach().requires_grad_(), dy.detach().requires_grad_()
        found = torch.autograd.grad(self(dz, dy)[which].sum(), (dz, dy))
        return tuple(torch.nan_to_num(x) for x in found)

    def first_order(self, which: int) -> np.ndarray:
        """`sum |slope| radius`, `[T]`."""
        by_z, by_y = self.slopes(which)
        return ((by_z.abs() * self.rz).sum(-1) + (by_y.abs() * self.ry).sum(-1)).numpy()

    def corners(self, which: int, steps: int = 4) -> list[tuple[np.ndarray, np.ndarray]]:
        """Corners of the box that D or C climbs to, up and down, by the signs of its slopes."""
        found = []
        for side in (1, -1):
            dz, dy = torch.zeros_like(self.rz), torch.zeros_like(self.ry)
            for _ in range(steps):
                by_z, by_y = self.slopes(which, dz, dy)
                dz, dy = side * self.rz * by_z.sign(), side * self.ry * by_y.sign()
                found.append((dz.numpy(), dy.numpy()))
            if self.name == "tv" and which == 1:  # signs change C where tokens cross
                # toward the sign of their rate, or away from it
                v = self._rate_signs()
                seen = v if self.part == "full" else v.gather(-1, self.ids)
                found.append(((side * self.rz * v).numpy(), (-side * self.ry * seen).numpy()))
        return found

    def _rate_signs(self) -> torch.Tensor:
        pi = torch.softmax(self.z, -1)
        own = torch.nn.functional.one_hot(self.k, pi.shape[-1])
        pi_k, n2 = (pi * own).sum(-1, keepdim=True), (pi * pi).sum(-1, keepdim=True)
        return torch.sign(own - pi - pi_k + n2)

    def farthest(self, which: int) -> np.ndarray:
        """The largest movement among the corners, `[T]`."""
        zero = torch.zeros_like(self.rz), torch.zeros_like(self.ry)
        start = self(*zero)[which]
        moved = [
            (self(torch.tensor(dz), torch.tensor(dy))[which] - start).abs().nan_to_num(0.0)
            for dz, dy in self.corners(which)
        ]
        return torch.stack(moved).max(0).values.numpy()


@dataclass
class Truth:
    """Enclosures of D and C of rows."""

    rows: Rows
    view: tuple[str, str | None]
    name: str

    def __post_init__(self) -> None:
        judge = Judge(self.rows)
        part, tail = self.view
        self.values = judge.divergence(self.name, part), judge.coefficient(self.name, part, tail)

    def broken(self, other: Truth, bounds) -> list[np.ndarray]:
        """`[T]` each, whether D, C of the other rows are certainly beyond the bounds."""
        found = []
        for mine, theirs, bound in zip(self.values, other.values, bounds, strict=True):
            with np.errstate(invalid="ignore"):
                away = np.maximum(theirs.low - mine.high, mine.low - theirs.high)
            found.append(away > bound)
        return found


def displacements(rows: Rows, radii: Radii, view, name: str, rng) -> list:
    """Worst corners of D and C, random corners, and random points inside."""
    part, tail = view
    sizes = _sizes(rows, radii, part)
    witness = Witness(rows, radii, name, part, tail)
    found = [*witness.corners(0, 2), *witness.corners(1, 2)]
    found += [tuple(x * rng.choice([-1.0, 1.0], x.shape) for x in sizes) for _ in range(2)]
    return [*found, tuple(x * rng.uniform(-1, 1, x.shape) for x in sizes)]


def check(rows: Rows, radii: Radii, seed: int = 0, views=VIEWS, names=DIVERGENCES) -> None:
    """Nothing found in the box is beyond its bounds."""
    rng = np.random.default_rng(seed)
    for view, name in itertools.product(views, names):
        part, tail = view
        bounds = reach(rows, radii, divergence=name, partition=part, tail=tail)
        before = Truth(rows, view, name)
        for dz, dy in displacements(rows, radii, view, name, rng):
            after = Truth(displaced(rows, part, dz, dy), view, name)
            for what, broken in zip("DC", before.broken(after, bounds), strict=True):
                assert not broken.any(), (what, name, view, np.flatnonzero(broken))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([3, 4, 7, 40]))
def test_nothing_in_the_box_is_beyond_reach(seed, size):
    check(*random_rows(seed, size), seed)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("stage", "number_format"),
    [
        ("stored-logits", "bf16"),
        ("stored-logits", "e4m3"),
        ("stored-logprobs", "bf16"),
        ("stored-logprobs", "fp16"),
    ],
)
def test_nothing_stored_is_beyond_reach(family, stage, number_format):
    views = VIEWS if stage == "stored-logits" else VIEWS[1:]
    check(*stored(family, stage, number_format, 1000, 16), views=views)


@pytest.mark.parametrize("family", ["peaked", "near-one-hot"])
def test_nothing_is_beyond_reach_in_a_large_vocabulary(family):
    rows, radii = stored(family, "stored-logits", "bf16", 32768, 16)
    check(rows.take(slice(0, 3)), radii.take(slice(0, 3)), views=VIEWS[:2])


def test_one_kind_of_number_alone():
    rows, radii = random_rows(1, 9)
    none = Radii()
    for name in vars(radii):
        check(rows, replace(none, **{name: getattr(radii, name)}))


@pytest.mark.parametrize("name", ["kl", "tv"])
def test_a_list_of_the_whole_vocabulary_has_no_tail(name):
    """Retained masses then move freely: they need not sum to 1."""
    z = np.array([[0.0, 1.0, 2.0, -1.0]] * 4)
    rows = policies(z, z[:, ::-1].copy(), np.array([0, 1, 2, 3]), 3)
    left = np.setdiff1d(np.arange(4), rows.topk_ids[0])[0]
    rows = rows.take(np.full(2, left))
    check(rows, Radii(logprobs=np.full((2, 3), 0.2), sampled=np.full(2, 0.3)), 0, VIEWS[1:], [name])


def test_a_behavior_tail_that_may_have_no_mass():
    rows, _ = random_rows(2, 12)
    radii = Radii(logprobs=np.full(rows.topk_logprobs.shape, 0.5), sampled=np.full(6, 0.5))
    check(rows, radii, 0, VIEWS[1:])
    d, c = reach(rows, radii, divergence="reverse-kl", partition="topk", tail="exact")
    loose = np.isinf(d)
    assert loose.any()
    assert np.isinf(c[loose]).all()
    for name in ("kl", "tv"):
        d, c = reach(rows, radii, divergence=name, partition="topk", tail="exact")
        assert np.isfinite(d).all()
        assert np.isfinite(c).all()


TIGHT = {
    # stage, format: 1.x of the farthest corner found, median over rows, D and C
    ("stored-logits", "fp16"): (1.8, 1.1),
    ("stored-logits", "bf16"): (1.8, 1.4),
    ("stored-logprobs", "fp16"): (1.8, 1.1),
    ("stored-logprobs", "bf16"): (1.8, 1.4),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("stage", "number_format"), TIGHT)
def test_bounds_are_hardly_larger_than_the_worst_corner(family, stage, number_format):
    rows, radii = stored(family, stage, number_format, 500)
    limits = TIGHT[stage, number_format]
    for view in VIEWS[stage == "stored-logprobs" :]:
        part, tail = view
        bounds = reach(rows, radii, divergence="kl", partition=part, tail=tail)
        for which, (bound, limit) in enumerate(zip(bounds, limits, strict=True)):
            found = Witness(rows, radii, "kl", part, tail).farthest(which)
            seen = np.isfinite(bound) & (found > 2.0**-40)
            assert seen.sum() > len(rows) // 2
            assert np.median(bound[seen] / found[seen]) < limit, (view, which)


def first_order_ratios(name: str, view, which: int) -> np.ndarray:
    """`reach` over the witness's `sum |slope| radius` for radii of 2^-24."""
    part, tail = view
    ratios = []
    for seed in (1, 2, 4, 5, 7, 8, 10, 11):
        rows, radii = random_rows(seed, (3, 5, 12, 60)[seed % 4])
        small = Radii(*(np.where(x > 0, 2.0**-24, 0.0) for x in vars(radii).values()))
        found = Witness(rows, small, name, part, tail).first_order(which)
        bound = reach(rows, small, divergence=name, partition=part, tail=tail)[which]
        # where slopes and the behavior tail are far larger than their changes over the box
        seen = np.isfinite(bound) & (found > 2.0**-36)
        if part == "topk":
            seen &= Judge(rows).tail_mass()[1].low > 2.0**-10
        ratios.append(bound[seen] / found[seen])
    return np.concatenate(ratios)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", ["kl", "reverse-kl"])
@pytest.mark.parametrize("view", VIEWS)
def test_small_radii_give_the_sum_of_slopes(view, name, which):
    ratios = first_order_ratios(name, view, which)
    assert len(ratios) > 6
    assert (ratios > 1).all()
    assert ratios.max() < 1 + 2.0**-10 or view[1] == "exact"
    # an exact tail's logit and its collision mass are bounded apart
    assert ratios.max() < 1.2


def _less_eps(monkeypatch):
    eps = boxes.Box.eps.func
    monkeypatch.setattr(boxes.Box, "eps", property(lambda box: eps(box) * 0.9))


def _half_difference(monkeypatch):
    whole = boxes.Box.difference.func
    monkeypatch.setattr(boxes.Box, "difference", property(lambda box: whole(box) * 0.5))


def _half_taken(monkeypatch):
    whole = noise._absorbed
    monkeypatch.setattr(noise, "_absorbed", lambda own, rate, box: whole(own, rate * 0.5, box))


def _half_weighted(monkeypatch):
    whole = boxes.Box.weighted.func
    monkeypatch.setattr(boxes.Box, "weighted", property(lambda box: whole(box) * 0.5))


def _still_collision_mass(monkeypatch):
    monkeypatch.setattr(boxes, "_tail_spread", lambda share, kappa, r, common: kappa * 0)


def _no_jumps(monkeypatch):
    monkeypatch.setattr(noise, "_jumps", lambda box, v: np.zeros(len(box.is_k)))


PLANTED = {
    "eps too small": (_less_eps, "kl", ("full", None), 1),
    "half of pi - mu": (_half_difference, "kl", ("full", None), 0),
    "half of kappa pi": (_half_weighted, "reverse-kl", ("full", None), 1),
    "half of the tail's share": (_half_taken, "kl", ("topk", "uniform"), 1),
    "a tail that does not change inside": (_still_collision_mass, "kl", ("topk", "exact"), 1),
}


@pytest.mark.parametrize("error", PLANTED)
def test_planted_errors_are_seen(error, monkeypatch):
    plant, name, view, which = PLANTED[error]
    plant(monkeypatch)
    assert (first_order_ratios(name, view, which) < 1).any()


@pytest.mark.parametrize(
    ("plant", "name", "view"),
    [(_half_taken, "kl", ("topk", "uniform")), (_no_jumps, "tv", ("full", None))],
)
def test_a_planted_error_breaks_a_bound(plant, name, view, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=name):
        check(*random_rows(4, 12), views=[view], names=[name])


def test_masses_that_underflow_may_come_back():
    rows, _ = random_rows(4, 12)
    z, y = rows.logits.copy(), rows.behavior_logits.copy()
    z[:, 3], y[:, 3] = -900.0, -700.0
    rows = policies(z, y, np.where(rows.tokens == 3, 0, rows.tokens), 4)
    for far in (1.0, 400.0, 690.0):
        radius = np.full(z.shape, 0.01)
        radius[:, 3] = far
        check(rows, Radii(radius, radius), views=VIEWS[:2])
    radius[:, 3] = np.inf
    for (part, tail), name in itertools.product(VIEWS, DIVERGENCES):
        found = reach(rows, Radii(radius, radius), divergence=name, partition=part, tail=tail)
        assert np.isinf(found[0]).all()
        assert tail in ("aggregated", "uniform") or np.isinf(found[1]).all()


def test_without_radii_nothing_moves():
    rows, _ = random_rows(3, 8)
    for (part, tail), name in itertools.product(VIEWS, DIVERGENCES):
        for moved in reach(rows, Radii(), divergence=name, partition=part, tail=tail):
            assert (moved == 0).all()


def test_a_token_in_one_policy_alone_leaves_the_divergence_open():
    rows, radii = random_rows(1, 6)
    z = rows.logits.copy()
    z[:, (rows.tokens[0] + 1) % 6] = -np.inf
    d, _ = reach(replace(rows, logits=z), radii, divergence="kl", partition="full", tail=None)
    assert np.isinf(d).all()


def test_a_common_shift_of_the_logits_changes_nothing():
    rows, radii = random_rows(1, 6)
    z, y = (np.round(x * 2.0**20) / 2.0**20 for x in (rows.logits, rows.behavior_logits))
    rows = replace(rows, logits=z, behavior_logits=y)
    moved = replace(rows, logits=z + 2.0**20, behavior_logits=y - 64.0)
    for part, tail in VIEWS[:2]:
        one, two = (
            reach(x, radii, divergence="kl", partition=part, tail=tail) for x in (rows, moved)
        )
        assert (np.stack(one) == np.stack(two)).all()


def test_blocks_of_rows_agree_with_rows_alone():
    rows, radii = stored("peaked", "stored-logits", "bf16", 1000, 48)
    whole = reach(rows, radii, divergence="kl", partition="topk", tail="exact")
    for t in (0, 1, len(rows) - 1):
        one = rows.take(slice(t, t + 1)), radii.take(slice(t, t + 1))
        alone = reach(*one, divergence="kl", partition="topk", tail="exact")
        assert [x[t] for x in whole] == [x[0] for x in alone]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"divergence": "chi2"}, "divergence = chi2: noise knows kl, reverse-kl, tv"),
        ({"partition": "binary"}, "partition = binary"),
        ({"partition": "topk"}, "tail = None"),
        ({"radii": Radii(logits=np.zeros((2, 2)))}, "radii.logits.shape"),
        ({"radii": Radii(sampled=np.full(6, np.nan))}, r"radii.sampled\[0\] = nan"),
    ],
)
def test_bad_input_is_named(change, message):
    rows, radii = random_rows(1, 6)
    call = {"radii": radii, "divergence": "kl", "partition": "full", "tail": None, **change}
    with pytest.raises(InputError, match=message):
        reach(rows, call.pop("radii"), **call)


def listed(rows: Rows, ids: np.ndarray) -> Rows:
    """The rows with another list, `[K]` ids for every row."""
    log_mu = log_softmax(rows.behavior_logits)
    ids = np.broadcast_to(ids, (len(rows), len(ids)))
    return replace(rows, topk_ids=ids, topk_logprobs=np.take_along_axis(log_mu, ids, axis=-1))


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("view", VIEWS[1:])
def test_no_list_within_the_band_is_beyond_selection_reach(view, name):
    part, tail = view
    for seed in range(1, 9):
        whole, _ = random_rows(3 * seed + 1, 9)
        rng = np.random.default_rng(seed)
        for t in range(len(whole)):
            rows = whole.take(slice(t, t + 1))
            order = rng.permutation(9)
            core, band = order[:2], order[2:5]
            band_mask = np.zeros((1, 9), dtype=bool)
            band_mask[0, band] = True
            lists = [
                np.concatenate([core, np.array(more, dtype=np.int64)])
                for n in range(4)
                for more in itertools.combinations(band, n)
            ]
            truths = [Truth(listed(rows, ids), view, name) for ids in lists]
            for ids, before in zip(lists, truths, strict=True):
                bounds = selection_reach(
                    listed(rows, ids), band_mask, divergence=name, partition=part, tail=tail
                )
                for after in truths:
                    broken = before.broken(after, bounds)
                    assert not np.any(broken), (seed, t, ids, bounds)


def test_selection_reach_of_low_precision_lists():
    batch = build("flat", 0, sequences=2, length=16, vocab_size=300, top_k=20, dtype="fp32")
    source = source_of("flat", batch)
    exact = prepare(source, Setting())
    for number_format, (view, name) in itertools.product(
        ("bf16", "e4m3"), itertools.product(VIEWS[1:], DIVERGENCES)
    ):
        found = prepare(source, together("top-k", number_format))
        part, tail = view
        bounds = selection_reach(found.rows, found.band, divergence=name, partition=part, tail=tail)
        broken = Truth(found.rows, view, name).broken(Truth(exact.rows, view, name), bounds)
        assert not np.any(broken)
        settled = ~found.band.any(axis=-1)
        assert all((x[settled] == 0).all() for x in bounds)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partition": "full"}, "partition = full"),
        ({"band": np.zeros((2, 2), dtype=bool)}, "band.shape"),
    ],
)
def test_bad_selection_is_named(change, message):
    rows, _ = random_rows(1, 6)
    call = {"band": np.zeros((6, 6), dtype=bool), "partition": "topk", **change}
    with pytest.raises(InputError, match=message):
        selection_reach(rows, divergence="kl", tail="exact", **call)
