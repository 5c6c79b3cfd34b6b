"""Top log-prob lists as rollout engines return them, mended into a top-K view.

A completion interface that keys its list by TEXT loses entries: two ids with the same text (every
piece of a multi-byte character decodes to the empty string on its own) share one key, and the
later one overwrites.  It then adds the sampled token, wherever that ranked.  So asking for 20
gives 19, 20 or 21 entries, and text alone does not say which ids they are.

`ids_of_list` goes back from texts to ids with the engine's own (id, text, log-prob) candidates;
`mend` turns any list of (id, log-prob) pairs into exactly K distinct ids.  The sampled token's
log-prob travels by itself (`behavior_logprobs`), so a list need not hold it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdverify.batch import InputError

Candidate = tuple[int, str, float]
"""An engine's (id, text, log-prob)."""


def top_k_of(
    logprobs: NDArray[np.floating[Any]], k: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The `k` best ids of `[..., V]` and their float32 values, best first, lowest id on ties."""
    values = logprobs.astype(np.float32)
    ids = np.argsort(-values, axis=-1, kind="stable")[..., :k].astype(np.int64)
    return ids, np.take_along_axis(values, ids, axis=-1)


def mend(
    pairs: Iterable[tuple[int, float]], k: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Exactly `k` distinct ids and float32 log-probs: the best, lowest id on ties.

    Args:
        pairs: (id, log-prob in nats) in any order; an id may be listed twice with one value.
        k: `K`.

    Raises:
        InputError: an id with two values, or fewer than `k` distinct ids.
    """
    known: dict[int, float] = {}
    for position, (token, value) in enumerate(pairs):
        if known.setdefault(token, value) != value:
            raise InputError(
                "topk_logprobs",
                (position,),
                value,
                f"id {token} is listed before with {known[token]:.9g}",
            )
    if len(known) < k:
        raise InputError("topk_ids", None, len(known), f"fewer than K = {k} distinct ids")
    best = sorted(known.items(), key=lambda item: (-item[1], item[0]))[:k]
    return (
        np.array([token for token, _ in best], dtype=np.int64),
        np.array([value for _, value in best], dtype=np.float32),
    )


def ids_of_list(
    raw: Mapping[str, float], candidates: Sequence[Candidate]
) -> list[tuple[int, float]]:
    """(id, log-prob) pairs behind a list keyed by text.

    Entries that a shared text lost come back, and so do ids tied with the last entry.

    Args:
        raw: the engine's list, text -> log-prob (nats), the sampled token included.
        candidates: the engine's (id, text, log-prob) of every id at least as likely as the K-th
            best, and of the sampled token.

    Raises:
        InputError: an entry that no candidate explains: the list and the candidates are not of
            the same token.
    """
    explained = {(text, value) for _, text, value in candidates}
    for position, (text, value) in enumerate(raw.items()):
        if (text, value) not in explained:
            raise InputError(
                "top_logprobs",
                (position,),
                value,
                f"no id of the engine has the text {text!r} and this log-prob",
            )
    return [(token, value) for token, _, value in candidates]
