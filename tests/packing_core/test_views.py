"""Kernel views: boundaries cover every token, no segment is longer than stated, shapes fall into buckets."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packing_core import CapacityError, PackedBatch, PackingError, pack
from packing_core.batches.dataset import with_empty_row
from tests.packing_core.packings import by_definition, packings


@settings(max_examples=80)
@given(packings(), st.integers(0, 9), st.integers(1, 9))
def test_a_kernel_view_covers_every_token_with_segments_no_longer_than_it_says(packing, more, bucket):
    batch = pack(packing.documents, packing.plan, **packing.arrays)
    longest = int(packing.plan.length.max())
    view = batch.kernel_view(max_seqlen=longest + more if more else None, bucket=bucket)
    expected = by_definition(packing)
    size = batch.input_ids.size

    assert view.max_seqlen == longest + more
    assert type(view.max_seqlen) is int
    assert all(type(n) is int and 1 <= n <= view.max_seqlen for n in view.lengths)
    assert (len(view.cu_seqlens) - 1) % bucket == 0
    assert len(view.cu_seqlens) - 1 - len(view.lengths) < bucket
    np.testing.assert_array_equal(view.cu_seqlens[: len(view.lengths) + 1], np.cumsum([0, *view.lengths]))
    assert (view.cu_seqlens[len(view.lengths) :] == size).all()

    # The real segments are those of the batch, and padding is never in one of them.
    flat_ids = expected["segment_ids"].reshape(-1)
    seen = []
    for begin, length, is_padding in zip(view.cu_seqlens, view.lengths, view.is_padding):
        numbers = set(flat_ids[begin : begin + length])
        assert len(numbers) == 1
        assert (numbers == {0}) == is_padding
        np.testing.assert_array_equal(view.position_ids[begin : begin + length], np.arange(length))
        if not is_padding:
            seen.append((begin, length))
    assert seen == list(zip(batch.flat_starts, batch.lengths))
    np.testing.assert_array_equal(view.seq_idx, np.repeat(np.arange(len(view.lengths)), view.lengths))
    for name in ("input_ids", "targets"):
        np.testing.assert_array_equal(getattr(view, name), expected[name].reshape(-1))
    np.testing.assert_allclose(view.loss_weights, expected["loss_weights"].reshape(-1))


@settings(max_examples=60)
@given(packings(), st.integers(1, 5))
def test_padding_free_is_the_documents_and_nothing_else(packing, bucket):
    view = pack(packing.documents, packing.plan, **packing.arrays).padding_free(bucket=bucket)
    expected = by_definition(packing)
    real = expected["segment_ids"] > 0
    for name in ("input_ids", "targets", "position_ids", "loss_weights"):
        np.testing.assert_allclose(getattr(view, name), expected[name][real], err_msg=name)
    if "columns" in packing.arrays:
        np.testing.assert_array_equal(view.columns["reward"], expected["reward"][real])
    assert view.lengths == tuple(packing.plan.length.tolist())
    assert not any(view.is_padding)
    assert (view.cu_seqlens[len(view.lengths) :] == real.sum()).all()
    assert (len(view.cu_seqlens) - 1) % bucket == 0


@settings(max_examples=80)
@given(packings(), st.data())
def test_no_segment_lies_in_two_rows_wherever_rows_of_padding_are(packing, data):
    batch = pack(packing.documents, packing.plan, **packing.arrays)
    real = len(batch)
    for _ in range(data.draw(st.integers(1, 3))):
        batch = with_empty_row(batch)
    batch = batch[data.draw(st.permutations(range(len(batch))))]
    view = batch.kernel_view(max_seqlen=data.draw(st.sampled_from([None, 2 * batch.capacity])))
    assert {*range(0, batch.input_ids.size, batch.capacity)} <= {*view.cu_seqlens.tolist()}
    np.testing.assert_array_equal(np.diff(view.cu_seqlens), view.lengths)
    assert sum(n for n, is_padding in zip(view.lengths, view.is_padding) if not is_padding) == batch.n_tokens
    assert batch.padding_free().lengths == tuple(batch.lengths.tolist()) and len(batch) > real


def test_a_view_that_kernels_cannot_take_is_refused():
    batch = pack([[1, 2, 3], [4]], 4)
    with pytest.raises(CapacityError, match="max_seqlen is 2 and the longest segment has 3 tokens: pass at least that"):
        batch.kernel_view(max_seqlen=2)
    with pytest.raises(PackingError, match="bucket must be an integer of at least 1, got 0"):
        batch.padding_free(bucket=0)
    wide = np.broadcast_to(np.zeros(1, np.int8), (2, 2**31))
    with pytest.raises(
        CapacityError, match=r"4,294,967,296 tokens are more than int32 kernels count: .* batch\[first:last"
    ):
        PackedBatch.kernel_view(_Huge(wide))


class _Huge:
    """Stands in for a batch too large to allocate in a test."""

    def __init__(self, input_ids):
        self.input_ids = input_ids
