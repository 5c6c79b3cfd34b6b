"""The forms side by side: the timed torch code computes what the forms do."""

from __future__ import annotations

import numpy as np
import pytest

from pdverify.cases import build
from pdverify.oracle import Judge
from pdverify.precision.forms import FORMS
from pdverify.precision.records import Options
from pdverify.precision.side_by_side import _WAYS, KINDS, compare_forms, time_ratios
from pdverify.precision.statistics import scale_of

PAIRS = [(name, form) for name, ways in _WAYS.items() for form in ways]


def test_every_form_is_timed():
    assert set(PAIRS) == {(name, form) for form, x in FORMS.items() for name in x.divergences}


@pytest.mark.parametrize(("name", "form"), PAIRS)
def test_timed_code_is_right(name, form):
    import torch

    rows = build("zipf", 3, sequences=4, length=8, vocab_size=300, top_k=20, dtype="fp32").rows()
    z, y = (torch.from_numpy(x).double() for x in (rows.logits, rows.behavior_logits))
    found = _WAYS[name][form](z, y, torch.from_numpy(rows.tokens)[:, None]).numpy()
    exact = Judge(rows).coefficient(name, "full", None).mid
    off = np.abs(found - exact) / scale_of(rows, name, "full", None)
    assert off.max() < 1e-12


def test_ratios_are_to_the_plain_form():
    rows = build("flat", 0, sequences=1, length=4, vocab_size=64, top_k=8, dtype="fp32").rows()
    ratios = time_ratios("kl", rows)
    assert ratios.keys() == {"plain", "complement", "difference", "moments"}
    assert ratios["plain"] == 1.0


def test_differences_of_logits_keep_the_bits_that_others_lose():
    options = Options(vocab_size=500, tokens=32, divergences=("kl",))
    rows = list(compare_forms(options, lambda *_: None))
    assert {x.peakedness for x in rows} == set(KINDS)
    bits = {(x.peakedness, x.form): x for x in rows if (x.inputs, x.arithmetic) == ("fp32", "fp32")}
    for kind in KINDS:
        assert bits[kind, "difference"].bits > 18
        assert bits[kind, "difference"].wrong_signs.count == 0
    assert bits["near-one-hot", "plain"].bits < 10
    assert bits["near-equal", "moments"].bits < 20
    narrow = [x for x in rows if x.arithmetic == "bf16"]
    assert max(x.bits for x in narrow) < 12
    assert all(x.bits_low <= x.bits <= x.bits_high for x in rows)
