"""Segments cut into the pieces that a chunk of attention sees."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torch_backend.segments import PackedMetadata, host_lengths, refined


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(1, 8))
def test_every_document_is_cut_at_the_multiples_of_a_chunk(lengths: list[int], chunk: int) -> None:
    pieces = host_lengths(refined(PackedMetadata.from_lengths(lengths), chunk))
    ends = {
        sum(lengths[:n]) + end for n, length in enumerate(lengths) for end in (*range(chunk, length, chunk), length)
    }
    assert [sum(pieces[: n + 1]) for n in range(len(pieces))] == sorted(ends)
