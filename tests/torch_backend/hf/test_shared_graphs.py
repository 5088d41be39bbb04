"""Equal layers share their compiled graphs, however many there are: torch compiles no more than eight of one class."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.torch_backend.guards import DeviceGuard
from tests.torch_backend.models import collate, documents, tiny
from torch_backend import patch, unpatch
from torch_backend.hf.patch import state_of
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.steps.cuda_graph import compile_layers

THREE = {"num_hidden_layers": 3}
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 8,
}


@pytest.mark.parametrize(
    ("family", "changes", "kinds"),
    [("llama", THREE, 1), ("qwen2_moe", {**THREE, **WINDOWS}, 2)],
    ids=["llama", "qwen2_moe"],
)
def test_layers_of_a_kind_share_a_graph(interpreted: None, family: str, changes: dict[str, Any], kinds: int) -> None:
    model = patch(tiny(family, **changes), implementation="triton", verify=False).train()
    state_of(model).guard = DeviceGuard()  # type: ignore[union-attr] # boundaries on the CPU would be read
    given = collate(documents((5, 19)), capacity=32, max_seqlen=32, bucket=16)
    given = {name: value for name, value in given.items() if name != "packed_lengths"}
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph

    with torch.no_grad():
        exact = causal_lm_loss(model, given)[0]
        compile_layers(model, backend=backend)
        found = causal_lm_loss(model, given)[0]
    torch.testing.assert_close(found, exact)
    assert len(graphs) == kinds + 1, "and one of the last norm"


def test_the_kind_of_a_layer_is_gone_with_the_patch() -> None:
    model = tiny("qwen2_moe", **THREE, **WINDOWS)
    before = [dict(m.__dict__) for m in model.modules()]
    unpatch(patch(model, verify=False))
    assert [m.__dict__.keys() for m in model.modules()] == [b.keys() for b in before]
