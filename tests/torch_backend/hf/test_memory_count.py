"""Counts what compiled layers keep between forward and backward, beside the formula by which memory is told."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM

from packing_core.training.memory_model import MemoryModel
from tests.torch_backend.guards import DeviceGuard
from tests.torch_backend.models import collate, documents, tiny
from torch_backend import patch
from torch_backend.auditing.tiny import family_config, tiny_config
from torch_backend.hf.patch import state_of
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.steps.cuda_graph import compile_layers
from torch_backend.steps.memory import level_layers, recomputing_inside, set_level

TOKENS = 128


@pytest.fixture
def no_kernels(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches write nothing: what layers keep has shapes, which follow from no value."""
    from triton.runtime.interpreter import InterpretedFunction

    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda *_: lambda *_, **__: None)
    monkeypatch.setattr(InterpretedFunction, "run", lambda *_, **__: None)


def counted(family: str, level: Any, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[int, Any]:
    """Counts the bytes of a token that all layers keep, less what layers share, and returns them with the config."""
    model = patch(tiny(family, **changes).to(dtype), implementation="triton", verify=False).train()
    state_of(model).guard = DeviceGuard()  # type: ignore[union-attr] # boundaries on the CPU would be read
    given = collate(documents((5, 19, 33, 71)), capacity=TOKENS, max_seqlen=TOKENS, bucket=16)
    given = {name: value for name, value in given.items() if name != "packed_lengths"}
    with torch.no_grad():
        causal_lm_loss(model, given)
    set_level(model, level)
    run = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        bw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
    )

    def backend(graph: Any, inputs: Any) -> Any:
        with config.patch(ban_recompute_materialized_backward=False):  # as compiled layers have it
            return run(graph, inputs)

    compile_layers(model, backend=backend, recompute=False, memory=level)
    shared = {p.data_ptr() for p in model.parameters()}
    found: list[dict[int, int]] = []

    def around(call: Any) -> Any:
        def layer(*args: Any, **kwargs: Any) -> Any:
            kept: dict[int, int] = {}

            def note(x: torch.Tensor) -> torch.Tensor:
                if x.data_ptr() not in shared and x.numel() >= TOKENS:
                    kept[x.data_ptr()] = x.nbytes
                return x

            with saved_tensors_hooks(note, lambda x: x):
                result = call(*args, **kwargs)
            found.append(kept)
            return result

        return layer

    for layer in state_of(model).decoder.layers:  # type: ignore[union-attr]
        layer._compiled_call_impl = around(layer._compiled_call_impl)
    with recomputing_inside(level_layers(model)):
        causal_lm_loss(model, given)
    layers = Counter(place for kept in found for place in kept)  # several keep boundaries, and angles of their kind
    own = sum(size for kept in found for place, size in kept.items() if layers[place] == 1)
    return own // TOKENS, model.config


WIDE = {"intermediate_size": 160}  # more than twice the width of 64, so that "selective" keeps no inner columns
TWO_OF_EACH_KIND = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
HYBRID_OF_FOUR = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
DENSE = {"first_k_dense_replace": 2, "intermediate_size": 32}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes", "level"),
    [  # of each mixer, each form of an MLP or experts, and norms behind them
        *((family, {}, "none") for family in ("gemma2", "gpt_oss", "qwen2_moe", "qwen3_5_text", "afmoe")),
        *((family, {}, "none") for family in ("falcon_h1", "granitemoehybrid", "nemotron_h", "recurrent_gemma")),
        ("deepseek_v3", DENSE, "none"),
        ("arcee", WIDE, "none"),
        ("gemma3_text", WIDE | TWO_OF_EACH_KIND, "selective"),
        ("gpt_oss", {}, "selective"),
        ("qwen3", WIDE, "selective"),
        ("qwen3", {}, "attention"),
        ("qwen3_5_text", HYBRID_OF_FOUR, "attention"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_formula_counts_what_a_compiled_layer_keeps(
    no_kernels: None, family: str, changes: dict[str, Any], level: str
) -> None:
    found, config = counted(family, level, **changes)
    sizes = config.to_dict()
    if family == "deepseek_v3":
        sizes["n_routed_experts"] = sizes["num_experts_per_tok"] = None
    memory = MemoryModel.from_config(sizes, itemsize=4)
    assert memory.kept[level] == pytest.approx(found, rel=0.05)


@pytest.mark.slow
def test_what_scans_keep_in_float32_counts_twice_in_bfloat16(no_kernels: None) -> None:
    found, config = counted("mamba2", "none", torch.bfloat16)
    assert MemoryModel.from_config(config).kept["none"] == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "qwen2",
        "gemma2",
        "olmo2",
        "qwen3_next",
        "mamba2",
        "falcon_h1",
        "recurrent_gemma",
        "gpt_oss",
        "nemotron_h",
        "deepseek_v3",
        "glm4_moe",
        "afmoe",
        "ernie4_5_moe",
        "hy_v3",
        "qwen3_moe",
    ],
)
def test_the_formula_counts_the_weights_of_products_in_every_kind_of_layer(family: str) -> None:
    sizes = tiny_config(family_config(family), head_dim=16)
    if family == "qwen3_moe":
        sizes.mlp_only_layers = [0]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(sizes)
    weights = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    memory = MemoryModel.from_config(sizes.to_dict(), itemsize=4)
    assert memory.gradients == pytest.approx(4 * weights, rel=0.01), "all but norms and biases"
