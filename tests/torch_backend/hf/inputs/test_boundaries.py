"""Boundaries whose values only the device knows: whatever they hold, the segments cover every token of the batch.

So every kernel writes every row of its outputs: of empty segments behind them, the tests of each kernel have some.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from packing_core.errors import LayoutError
from tests.torch_backend.guards import DeviceGuard
from torch_backend.hf.inputs.boundaries import take_metadata
from torch_backend.ops.scan.libraries.fla import chunks as chunks_of
from torch_backend.pieces import most_pieces
from torch_backend.segments import PackedMetadata

ROWS, ROW_LENGTH, LONGEST = 2, 20, 8
TOKENS = ROWS * ROW_LENGTH
# what a batch of two rows of 20 tokens may say of itself, right and wrong
BOUNDARIES = {
    "right": [0, 5, 12, 20, 28, 33, 40],
    "padded with its end": [0, 5, 12, 20, 28, 40, 40],
    "padded with zeros": [0, 5, 12, 20, 28, 0, 0],
    "stop before the tail": [0, 5, 12, 13, 14, 15, 16],
    "begin after the first token": [3, 5, 12, 20, 28, 33, 40],
    "cross from one row into the next": [0, 5, 12, 18, 25, 33, 40],
    "decrease": [0, 12, 5, 28, 20, 40, 33],
    "beyond the batch": [0, 5, 12, 20, 28, 33, 2**31 - 1],
    "below zero": [-7, 5, 12, 20, 28, 33, 40],
    "longer than claimed": [0, 1, 19, 20, 21, 22, 40],
    "nothing": [0, 0, 0, 0, 0, 0, 0],
}


def on_device(boundaries: list[int], device: torch.device | str = "cpu") -> PackedMetadata:
    given = torch.tensor(boundaries, dtype=torch.int32, device=device)
    return PackedMetadata.from_boundaries(given, rows=ROWS, row_length=ROW_LENGTH, max_seqlen=LONGEST, device=device)


def by_hand(boundaries: list[int], rows: int = ROWS, row_length: int = ROW_LENGTH, longest: int = LONGEST) -> list[int]:
    """Lengths of the segments between all cuts that stand inside the batch, none longer than the longest."""
    cuts = {min(max(cut, 0), rows * row_length) for cut in boundaries} | {row * row_length for row in range(rows + 1)}
    return [min(longest, end - at) for start, end in pairwise(sorted(cuts)) for at in range(start, end, longest)]


@pytest.mark.parametrize("seed", range(10))
def test_any_integers_are_cuts(seed):
    generator = np.random.default_rng(seed)
    rows, row_length, longest, count = (int(n) for n in generator.integers(1, [5, 30, 40, 12]))
    drawn = generator.integers(-10, rows * row_length + 10, count).tolist()
    packed = PackedMetadata.from_boundaries(
        torch.tensor(drawn), rows=rows, row_length=row_length, max_seqlen=longest, device="cpu"
    )
    assert packed.cu_seqlens.dtype == torch.int32 and packed.lengths is None
    lengths = packed.cu_seqlens.diff().tolist()
    right = by_hand(drawn, rows, row_length, longest)
    assert lengths == right + [0] * (len(lengths) - len(right))
    assert packed.max_seqlen == min(longest, row_length) >= max(lengths)


def test_a_segmentation_never_has_more_pieces_than_the_list_has_entries():
    for lengths in ([1] * 7, [8] * 5, [9] * 5, [1, 40, 3], [40]):
        assert most_pieces(sum(lengths), len(lengths), 8) >= sum(-(-n // 8) for n in lengths)
    assert most_pieces(5 * 9, 5, 8) == 10  # it can be reached


def test_one_compiled_graph_serves_all_boundaries():
    graphs = []

    def counting(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    def segments(given: Tensor) -> Tensor:
        return PackedMetadata.from_boundaries(
            given, rows=ROWS, row_length=ROW_LENGTH, max_seqlen=LONGEST, device="cpu"
        ).cu_seqlens

    compiled = torch.compile(segments, fullgraph=True, backend=counting)
    for boundaries in BOUNDARIES.values():
        given = torch.tensor(boundaries)
        assert torch.equal(compiled(given), segments(given))
    assert len(graphs) == 1


@pytest.mark.parametrize("boundaries", [[0, 7], [0, 5, 11], [0, 20, 23], [0, 20, 40]])
def test_a_tail_that_is_read_on_the_host_stays_in_its_rows_too(boundaries):
    marks = torch.tensor(boundaries, dtype=torch.int32)
    batch = {"cu_seq_lens_q": marks, "cu_seq_lens_k": marks}
    found = take_metadata(
        batch, tokens=torch.zeros(ROWS, ROW_LENGTH, dtype=torch.int64), host_lengths=True, guard=DeviceGuard()
    )
    longest = max(end - start for start, end in pairwise(boundaries))
    assert found.lengths == tuple(by_hand(boundaries, longest=longest))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": torch.zeros(3)}, r"boundaries are integers \[N\+1\], got torch.float32 \[3\]"),
        ({"cu_seqlens": torch.zeros(1, 3, dtype=torch.int32)}, r"got torch.int32 \[1, 3\]"),
        ({"max_seqlen": 0}, "rows, row_length and max_seqlen are at least 1, got 2, 20 and 0"),
        ({"rows": 0}, "got 0, 20 and 8"),
    ],
)
def test_what_is_no_list_of_boundaries_raises(change, message):
    given = {"cu_seqlens": torch.tensor([0, 5]), "rows": ROWS, "row_length": ROW_LENGTH, "max_seqlen": LONGEST}
    with pytest.raises(LayoutError, match=message):
        PackedMetadata.from_boundaries(**{**given, **change}, device="cpu")


@pytest.mark.parametrize("boundaries", BOUNDARIES.values(), ids=BOUNDARIES)
def test_the_chunks_of_a_scan_hold_every_token_once(boundaries):
    starts, chunks = chunks_of(on_device(boundaries))
    bounds = [(starts[s] + 64 * c, min(starts[s] + 64 * (c + 1), starts[s + 1])) for s, c in chunks.tolist()]
    assert sorted(token for start, stop in bounds for token in range(start, stop)) == list(range(TOKENS))


def test_a_recording_gets_the_boundaries_of_the_calls_before_it(monkeypatch):
    """Others would have other shapes, and compiled layers would be compiled again inside of the recording."""

    def taken() -> Tensor:
        batch = {"cu_seq_lens_q": torch.tensor([0, 5, 8, 14, 14]), "max_length_q": 7}
        tokens = torch.zeros(2, 8, dtype=torch.long)
        return take_metadata(batch, tokens=tokens, host_lengths=False, guard=DeviceGuard()).cu_seqlens

    before = taken()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert torch.equal(taken(), before)


@pytest.mark.gpu
def test_nothing_is_read_back_from_a_gpu():
    given = torch.tensor(BOUNDARIES["right"], device="cuda")
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed = PackedMetadata.from_boundaries(
            given, rows=ROWS, row_length=ROW_LENGTH, max_seqlen=LONGEST, device="cuda"
        )
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert packed.cu_seqlens.tolist()[:7] == BOUNDARIES["right"]
