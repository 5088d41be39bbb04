"""SPARSE: attention in which each query sees the keys of its segment that an indexer scores highest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conformance.checks import ask_index_loss, check_index_loss, check_isolated, check_pairs, compare_mask, visible_keys
from conformance.draws import FULL, MIXED, PADDED, SELECTED_PAIRS, AttentionCase, Rows, generator, segment_ids
from conformance.judge import LARGE, Judge
from conformance.oracle import Result
from packing_core.protocol import DTYPES, Array, segments

requirement = pytest.mark.requirement

# | 3 | 4 | 7 | 1 | 9 | 8 of padding |: below, at and above a top-k of 4.
AROUND: Rows = ((3, 4, 7, 1, 9, -8),)
TOP_K = 4


@requirement("SPARSE-01")
@pytest.mark.parametrize("top_k", [1, TOP_K])
def test_a_query_sees_the_best_keys_of_its_segment(judge: Judge, top_k: int) -> None:
    case = AttentionCase(AROUND, heads=1, kv_heads=1, width=32, top_k=top_k)
    index = {name: x for name, x in case.arguments(judge.dtype).items() if name.startswith("index")}
    seen = visible_keys(judge, AROUND, top_k=top_k, changed=index)
    products = np.einsum("bihf,bjf->bihj", index["index_q"], index["index_k"])
    (scores,) = np.einsum("bih,bihj->bij", index["index_weights"], np.maximum(products, 0))
    expected = np.zeros_like(seen)
    start = 0
    for length in (3, 4, 7, 1, 9):
        for query in range(start, start + length):
            own = scores[query, start : query + 1]
            expected[0, query, start + np.argsort(-own)[:top_k]] = True
        start += length
    compare_mask(judge, seen, expected)


@requirement("SPARSE-02")
@pytest.mark.parametrize(
    ("rows", "options"),
    [
        pytest.param(AROUND, {"top_k": TOP_K}, id="around the budget"),
        pytest.param(AROUND, {"top_k": 1}, id="one key"),
        pytest.param(FULL, {"top_k": 96}, id="above every segment"),
        pytest.param(PADDED, {"top_k": 9, "heads": 6, "kv_heads": 2}, id="padding and gqa"),
        pytest.param(FULL, {"top_k": 17, "sinks": True}, id="sinks"),
    ],
)
def test_selected_keys_are_those_of_the_segments_alone(judge: Judge, rows: Rows, options: dict[str, Any]) -> None:
    judge.check(AttentionCase(rows, **options))
    if "sinks" in options:
        check_pairs(judge, AttentionCase, SELECTED_PAIRS, [judge.dtype])


@requirement("SPARSE-03")
def test_what_a_segment_selects_moves_no_other(judge: Judge) -> None:
    check_isolated(judge, AttentionCase(AROUND, top_k=TOP_K), where=(0, 2, 4))


@requirement("SPARSE-04")
def test_of_equal_scores_as_many_are_seen_as_there_is_room_for(judge: Judge) -> None:
    """Keys score 2 where their place in the segment is a multiple of 3, else 1."""
    ids = segment_ids(AROUND)
    place = np.concatenate([np.arange(abs(length)) for length in AROUND[0]])
    high = (place % 3 == 0)[None]
    index = {
        "index_q": np.ones((*ids.shape, 2, 1), np.float32),
        "index_k": np.where(high, 2, 1)[..., None].astype(np.float32),
        "index_weights": np.ones((*ids.shape, 2), np.float32),
    }
    seen = visible_keys(judge, AROUND, top_k=TOP_K, changed=index)
    own = (ids[:, :, None] == ids[:, None, :]) & (ids[:, :, None] > 0) & np.tri(ids.shape[1], dtype=bool)
    judge.holds(not (seen & ~own).any(), "a query sees a key after it or of another segment")
    counts, room = seen.sum(-1), np.minimum(own.sum(-1), TOP_K)
    judge.equal("keys that queries see", counts, room)
    better = (seen & high[:, None]).sum(-1)
    judge.equal("keys of the larger score that queries see", better, np.minimum((own & high[:, None]).sum(-1), room))


# | 3 | 8 | 11 | 1 | 9 | 6 of padding |: shorter than a block of 4, of whole ones, and with 3 and 1 tokens behind.
BLOCKS: Rows = ((3, 8, 11, 1, 9, -6),)


@requirement("SPARSE-05")
@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_k": 2, "heads": 6, "kv_heads": 2}, {"top_k": 9}])
def test_blocks_of_keys_are_counted_and_chosen_in_their_segment(judge: Judge, options: dict[str, Any]) -> None:
    case = AttentionCase(BLOCKS, index_block=4, **options)
    judge.check(case)
    check_isolated(judge, case, where=(0, 2, 4))
    if options == {"top_k": 1}:
        _compare_best_blocks(judge)


def _compare_best_blocks(judge: Judge) -> None:
    """Compares what queries see to the best block that has ended in their segment, and to what is behind the last."""
    case = AttentionCase(BLOCKS, heads=1, kv_heads=1, width=38, top_k=1, index_block=4)
    index = {name: x for name, x in case.arguments(judge.dtype).items() if name.startswith("index")}
    seen = visible_keys(judge, BLOCKS, top_k=1, index_block=4, changed=index)
    (q,), (k,), (weights,) = index.values()
    expected = np.zeros_like(seen)
    start = 0
    for length in (3, 8, 11, 1, 9):
        for place in range(length):
            query, ended = start + place, (place + 1) // 4
            means = k[start : start + 4 * ended].reshape(-1, 4, 2).mean(1)
            scores = weights[query] @ np.maximum(q[query] @ means.T, 0)
            expected[0, query, start + 4 * ended : query + 1] = True
            if ended:
                best = start + 4 * int(scores.argmax())
                expected[0, query, best : best + 4] = True
        start += length
    compare_mask(judge, seen, expected)


# | 3 | 4 | 7 | 1 | 9 | 8 of padding | and | 3 of padding | 5 | 16 | 8 |
TWO_ROWS: Rows = (*AROUND, (-3, 5, 16, 8))


@requirement("SPARSE-06")
@pytest.mark.parametrize(
    "options",
    [{"top_k": 1}, {"top_k": TOP_K}, {"top_k": 12, "heads": 6, "kv_heads": 2}, {"rows": ((8,) * 4,) * 2, "top_k": 3}],
)
def test_an_indexer_learns_from_attention_inside_each_segment(judge: Judge, options: dict[str, Any]) -> None:
    case = AttentionCase(**{"rows": TWO_ROWS} | options)
    dout = generator("index_loss").standard_normal(len(segments(segment_ids(case.rows)))).astype(np.float32)
    before, expected = check_index_loss(judge, case, dout, judge.dtype)
    if options["top_k"] == TOP_K:
        judge.within(ask_index_loss(judge, case, None), expected, None, judge.dtype, only="out")
        check_index_loss(judge, case, dout, judge.dtype)  # once more
        for number in (0, 2, 4, 7):
            _compare_others(judge, case, dout, before, number)


@requirement("SPARSE-07")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loss_of_an_indexer_in_every_dtype(judge: Judge, dtype: str) -> None:
    for case in (AttentionCase(TWO_ROWS, top_k=TOP_K), AttentionCase(MIXED, heads=6, kv_heads=2, top_k=TOP_K)):
        check_index_loss(judge, case, np.ones(len(segments(segment_ids(case.rows))), np.float32), dtype)


def _compare_others(judge: Judge, case: AttentionCase, dout: Array, before: Result, number: int) -> None:
    """Changes all operands of one segment, and compares the losses and gradients of the others."""
    row, start, stop = segments(segment_ids(case.rows))[number]
    changed = {name: x.copy() for name, x in case.index_arguments(judge.dtype).items()}
    for name, x in changed.items():
        x[row, start:stop] = generator("change", name).choice([-1, 1], x[row, start:stop].shape) * LARGE[judge.dtype]
    after, because = ask_index_loss(judge, case, dout, changed), f"segment {number} changed"
    other, elsewhere = np.arange(len(dout)) != number, segment_ids(case.rows) > 0
    elsewhere[row, start:stop] = False
    judge.unmoved("the loss of others", before[0][other], after[0][other], because=because)
    for name, x in before[1].items():
        judge.unmoved(f"the gradient of {name} of others", x[elsewhere], after[1][name][elsewhere], because=because)
    moved = stop - start == 1 or before[0][number] != after[0][number]  # a token alone always chooses itself
    judge.holds(bool(moved), f"{because} and its loss did not move")
