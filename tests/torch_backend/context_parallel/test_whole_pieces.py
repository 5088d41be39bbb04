"""Rows of a model with a mesh whose documents lie on one rank each: layers run and are compiled as on one rank.

The other rank is not there: nothing of such a row is exchanged, and sums over ranks are those of this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from packing_core.errors import UnsupportedError
from packing_core.training.memory_model import LEVELS
from tests.torch_backend.context_parallel.test_rank_share import shares
from tests.torch_backend.models import collate, documents, tiny
from torch_backend import explain, make_train_step, patch
from torch_backend.hf.edits import stand_ins
from torch_backend.hf.edits.stand_ins import LayerSegments
from torch_backend.steps import cuda_graph, fast_backward, memory_fit, train_step
from torch_backend.steps.cuda_graph import compile_layers

ROWS = [(20, 20, 8, 8), (30, 30, 12, 12), (9, 9, 5, 5)]  # of which each of two ranks has a document of each length


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Rank 0 of two, whose collectives leave tensors as they are."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    monkeypatch.setattr(train_step, "wrappers_of", lambda model: [nn.Identity()])  # DDP needs the other rank
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"]
    dist.destroy_process_group()


def losses(family: str, mesh: Any, compile: Any, memory: Any = None) -> tuple[list[Tensor], str]:
    model = patch(tiny(family), implementation="triton", verify=False, mesh=mesh)
    step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.01), compile=compile, memory=memory)
    batches = [collate(documents(row), capacity=None) for row in ROWS]
    for batch in batches:
        batch["loss_weights"] = torch.linspace(0.5, 2, batch["input_ids"].numel()).view_as(batch["input_ids"])
    return [step(batch)["loss"] for batch in batches], str(explain(step))


@pytest.mark.slow  # compiles layers and interprets their kernels
@pytest.mark.parametrize(
    ("family", "graphs", "memory"),
    [*(("qwen3", 2, level) for level in LEVELS), ("qwen3_5_text", 3, "none"), ("qwen3_5_text", 3, "full")],
)
def test_layers_are_compiled_once_for_rows_of_any_length(
    family: str, graphs: int, memory: str, mesh: Any, interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []  # a graph of each kind of layer, and of the last norm

    def backend(graph: Any, inputs: list[Any]) -> Any:
        made.append(graph)
        return aot_eager(graph, inputs)

    def compile_for_the_cpu(model: Any, **given: Any) -> None:
        compile_layers(model, **{**given, "backend": backend})

    right, _ = losses(family, mesh, False)
    monkeypatch.setattr(cuda_graph, "DEVICE", "cpu")
    monkeypatch.setattr(fast_backward, "compile_layers", compile_for_the_cpu)
    found, explained = losses(family, mesh, "auto", memory)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=0)
    level = "" if memory == "none" else f', memory="{memory}"'
    how = f"compiled{level}, as on one rank where no document straddles ranks, else around what exchanges between ranks"
    if memory == "selective":
        how = f"compiled where no document straddles ranks{level}, else not: its layers exchange between"
    assert f"layers of the step: {how}" in explained
    assert "causal; no document straddles ranks" in explained
    assert len(made) == graphs


def test_ranks_do_not_choose_levels_of_memory_of_their_own(mesh: Any) -> None:
    model = patch(tiny("qwen3"), verify=False, mesh=mesh)
    with pytest.raises(UnsupportedError, match=r'memory="auto" chooses by the tokens that a rank holds, .* one level'):
        make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.01), memory="auto")


def test_no_formula_says_how_long_a_row_fits_over_ranks(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_fit, "device_bytes", lambda _: 2**40)
    for given in (None, mesh):
        model = patch(tiny("qwen3"), verify=False, mesh=given)
        step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.01))
        assert ("memory" in step.parts) == (given is None)


def test_a_convolution_exchanges_tokens_as_they_lie_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that its gradients, which compiled graphs write, need no transposed copy."""
    share = shares([9, 7], 2, contiguous=True)[0]
    whole: list[Tensor] = []

    def passed_on(tokens: Tensor, *_: Any) -> Tensor:
        whole.append(tokens)
        return tokens

    monkeypatch.setattr(stand_ins, "convolve_pieces", passed_on)
    tokens = torch.randn(1, len(share.tokens), 4)
    segments = LayerSegments(share.segments, share)
    out = stand_ins.convolve(lambda x, *_, **__: x, tokens.transpose(1, 2), torch.ones(4, 3), segments=segments)
    assert whole[0].is_contiguous() and out.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(out.transpose(1, 2), tokens)
