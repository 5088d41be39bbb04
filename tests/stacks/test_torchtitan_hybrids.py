"""The override for torchtitan's Qwen3.5, on a stand-in that ``python -m tests.stacks torchtitan`` compares."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from packing_core.errors import LayoutError, UnsupportedError
from tests.torch_backend.kernels import interpreted as interpreted

LENGTHS = (5, 1, 6, 3, 9)  # | 5 1 6 | 3 9: two rows of 12


def masks_of(*lengths: int, rows: int = 1) -> Any:
    attention = sys.modules["torchtitan.models.common.attention"]
    positions = torch.cat([torch.arange(n) for n in lengths]).view(rows, -1)
    return attention.create_varlen_metadata_for_document(positions)


def layer_of(plugin: Any) -> Any:
    torch.manual_seed(0)
    return plugin.PackedDeltaNet(plugin.packed_delta_net(plugin.GatedDeltaNet.Config()))


def alone(layer: Any, document: Tensor) -> Tensor:
    """Computes one document, [L, D], by the recurrence, token by token."""
    q, k, v = (convolved(layer.convs[n], layer.project[n](document)).unflatten(1, (2, 16)) for n in "qkv")
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    decay, strength = layer.gates(document).chunk(2, -1)
    decay, strength = (-decay.abs() / 4).exp(), strength.sigmoid()
    state, out = document.new_zeros(2, 16, 16), []
    for t in range(len(document)):
        state = state * decay[t, :, None, None]
        new = (v[t] - (state * k[t][..., None]).sum(1)) * strength[t, :, None]
        state = state + k[t][..., None] * new[:, None]
        out.append((state * q[t][..., None]).sum(1) / 4)
    return torch.stack(out).flatten(1)


def convolved(conv: Any, x: Tensor) -> Tensor:
    padded = torch.cat([x.new_zeros(2, x.shape[1]), x])
    return torch.nn.functional.silu(sum(conv.weight[:, 0, w] * padded[w : w + len(x)] for w in range(3)))


def test_a_layer_computes_each_document_alone(plugin, interpreted) -> None:
    layer, x = layer_of(plugin), torch.randn(2, 12, 32, requires_grad=True)
    out = layer(x, masks_of(*LENGTHS, rows=2))
    expected = torch.cat([alone(layer, document) for document in x.flatten(0, 1).split(LENGTHS)]).view_as(out)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    inputs, seed = (
        [x, *(p for n, p in layer.named_parameters() if not n.startswith("convs") or "weight" in n)],
        out.cos(),
    )
    pairs = zip(*(torch.autograd.grad(y, inputs, seed.detach()) for y in (out, expected)), strict=True)
    for found, right in pairs:
        torch.testing.assert_close(found, right, rtol=1e-4, atol=2e-5 * float(right.abs().max()))


@pytest.mark.slow
def test_one_graph_serves_batches_of_any_documents(plugin, interpreted) -> None:
    layer = layer_of(plugin)
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(1, 12, 32)
    for lengths in ((5, 7), (1, 3, 8), (2, 2, 2, 6)):
        torch.testing.assert_close(compiled(x, masks_of(*lengths)), layer(x, masks_of(*lengths)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_what_cannot_be_exact_is_refused(plugin, monkeypatch) -> None:
    layer, x = layer_of(plugin), torch.randn(1, 12, 32)
    with pytest.raises(
        LayoutError, match='would run all rows of the batch as one document: configure attn_backend="va'
    ):
        layer(x)
    with pytest.raises(UnsupportedError, match="the gated delta rule runs on a GPU.*: leave packed_delta_net out"):
        layer(x, masks_of(5, 7))
    monkeypatch.setattr(plugin, "DTensor", Tensor)
    with pytest.raises(
        UnsupportedError, match="does not cut its heads over ranks: leave it out, or tensor_parallel_de"
    ):
        layer(x, masks_of(5, 7))
