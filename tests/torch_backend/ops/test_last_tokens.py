"""Attention of queries that are the last tokens of longer key segments: as those rows of the whole documents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from packing_core import reference as oracle
from packing_core.errors import LayoutError, UnsupportedError
from tests.torch_backend.ops.test_sdpa import OPTIONS, arrays, implementation
from torch_backend.ops.attention import attention
from torch_backend.segments import PackedMetadata

__all__ = ["implementation"]

QUERIES, KEYS = (1, 3, 17, 9, 40, 2), (1, 50, 17, 64, 41, 30)


def drawn(heads: int, kv_heads: int, width: int, value_width: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = [(sum(QUERIES), heads, width), (sum(KEYS), kv_heads, width), (sum(KEYS), kv_heads, value_width)]
    return [torch.randn(shape, generator=g) for shape in shapes]


def last_rows() -> np.ndarray:
    ends = np.cumsum(KEYS)
    return np.concatenate([np.arange(end - n, end) for end, n in zip(ends, QUERIES, strict=True)])


@pytest.mark.parametrize("shape", [(4, 2, 16, 16), (4, 1, 8, 12)])
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients_are_those_rows_of_the_oracle(
    name: str, implementation: str, shape: tuple[int, ...]
) -> None:
    options: dict[str, Any] = OPTIONS[name]
    q, k, v = (x.requires_grad_() for x in drawn(*shape))
    packed = PackedMetadata.of_last_tokens(QUERIES, KEYS)
    out = attention(q, k, v, packed, implementation=implementation, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(out, (q, k, v), dout)

    rows, whole = last_rows(), [np.zeros((sum(KEYS), shape[0], width)) for width in shape[2:]]
    for array, values in zip(whole, (q, dout), strict=True):
        array[rows] = values.detach().numpy()
    given = whole[0], k.detach().numpy(), v.detach().numpy(), np.cumsum((0, *KEYS))
    expected = oracle.attention(*given, **arrays(options))[rows]
    found = oracle.attention_vjp(*given, whole[1], **arrays(options))
    expected_gradients = found["q"][rows], found["k"], found["v"]
    for got, want in zip((out, *gradients), (expected, *expected_gradients), strict=True):
        assert np.abs(got.detach().numpy() - want).max() <= 2e-5 * max(np.abs(want).max(), 1)


def test_implementations_without_it_refuse() -> None:
    q, k, v = drawn(4, 2, 16, 16)
    packed = PackedMetadata.of_last_tokens(QUERIES, KEYS)
    with pytest.raises(UnsupportedError, match=r"queries at the end of longer key segments: flex: takes as many keys"):
        attention(q, k, v, packed, implementation="flex")


def test_keys_and_segments_must_agree() -> None:
    q, k, v = drawn(4, 2, 16, 16)
    with pytest.raises(LayoutError, match=r"attention takes q \[T, H, D\]"):
        attention(q, k[1:], v[1:], PackedMetadata.of_last_tokens(QUERIES, KEYS))
    with pytest.raises(
        LayoutError, match=r"segment 1 has 5 queries, which are its last tokens, and 4 keys: count all of its tokens"
    ):
        PackedMetadata.of_last_tokens((1, 5), (3, 4))
    with pytest.raises(LayoutError, match=r"there are 2 segments of queries and 1 of keys: give each segment a length"):
        PackedMetadata.of_last_tokens((1, 5), (30,))
