"""Mending top log-prob lists, on made-up ones and on llama.cpp's own as they were returned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pdverify.batch import Batch, InputError
from pdverify.cases.recordings import default_recording, load_provenance, load_recording
from pdverify.tools.top_lists import ids_of_list, mend, top_k_of


def test_mend_keeps_exactly_k_best_and_drops_the_appended_sampled_token() -> None:
    ids, values = mend([(5, -0.5), (2, -1.5), (9, -2.0), (7, -9.0)], 3)
    assert ids.tolist() == [5, 2, 9]
    assert values.tolist() == [-0.5, -1.5, -2.0]
    assert (ids.dtype, values.dtype) == (np.int64, np.float32)


def test_mend_merges_an_id_listed_twice() -> None:
    assert mend([(0, -0.5), (0, -0.5), (1, -1.5)], 2)[0].tolist() == [0, 1]


def test_mend_breaks_ties_by_lowest_id() -> None:
    assert mend([(8, -1.0), (3, -1.0), (5, -0.5), (1, -1.0)], 3)[0].tolist() == [5, 1, 3]


def test_mend_rejects_one_id_with_two_values() -> None:
    with pytest.raises(InputError, match=r"topk_logprobs\[2\] = -3: id 4 is listed before with -1"):
        mend([(4, -1.0), (5, -2.0), (4, -3.0)], 1)


def test_mend_rejects_too_few() -> None:
    with pytest.raises(InputError, match="topk_ids = 2: fewer than K = 3"):
        mend([(4, -1.0), (5, -2.0), (4, -1.0)], 3)


def test_top_k_of_breaks_ties_by_lowest_id() -> None:
    ids, values = top_k_of(np.array([[-2.0, -1.0, -1.0, -1.0, -0.5]]), 3)
    assert ids.tolist() == [[4, 1, 2]]
    assert values.tolist() == [[-0.5, -1.0, -1.0]]


def test_texts_shared_by_two_ids_come_back_as_two_ids() -> None:
    candidates = [(3, "", -0.5), (4, " a", -1.0), (9, "", -2.0), (1, "z", -7.0)]
    raw = {"": -2.0, " a": -1.0, "z": -7.0}
    assert mend(ids_of_list(raw, candidates), 3)[0].tolist() == [3, 4, 9]


def test_a_list_of_another_token_is_rejected() -> None:
    with pytest.raises(InputError, match=r"top_logprobs\[1\] = -1: no id .* 'b'"):
        ids_of_list({"a": -0.5, "b": -1.0}, [(1, "a", -0.5), (2, "b", -1.25)])


@pytest.fixture(scope="module")
def batch() -> Batch:
    return load_recording(default_recording())["llama.cpp"]


@pytest.fixture(scope="module")
def origin() -> dict[str, Any]:
    return load_provenance(default_recording())["batches"]["llama.cpp"]


class TestRealLists:
    """The lists of llama.cpp in the recording, as its completion interface returned them."""

    K = 20

    def test_raw_lists_are_unusable_as_they_are(self, origin: dict[str, Any]) -> None:
        lengths = {len(raw) for raw in origin["raw_lists"]}
        assert min(lengths) < self.K
        assert max(lengths) == self.K + 1

    def test_mending_gives_the_recorded_view(self, batch: Batch, origin: dict[str, Any]) -> None:
        rows = batch.rows()
        assert len(origin["raw_lists"]) == len(origin["candidates"]) == len(rows)
        for t, (raw, found) in enumerate(
            zip(origin["raw_lists"], origin["candidates"], strict=True)
        ):
            candidates = [(int(i), str(text), float(x)) for i, text, x in found]
            ids, values = mend(ids_of_list(raw, candidates), self.K)
            np.testing.assert_array_equal(ids, rows.topk_ids[t])
            np.testing.assert_array_equal(values, rows.topk_logprobs[t])
            own = {i: x for i, _, x in candidates}[int(rows.tokens[t])]
            assert np.float32(own) == rows.behavior_logprobs[t]

    def test_text_alone_would_lose_ids(self, batch: Batch, origin: dict[str, Any]) -> None:
        for raw, found in zip(origin["raw_lists"], origin["candidates"], strict=True):
            lost = len(found) - len({text for _, text, _ in found})
            assert len(raw) == len(found) - lost
