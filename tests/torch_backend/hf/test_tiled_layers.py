"""MLPs by tiles of tokens: outputs and gradients of the whole MLP, and less memory of a long row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.torch_backend.graphs import graphs as graphs
from tests.torch_backend.guards import DeviceGuard
from tests.torch_backend.hf.test_memory import recording
from tests.torch_backend.models import collate, documents, in_float64, tiny
from tests.torch_backend.trainers.test_trainer import llama, peft
from torch_backend import make_train_step, patch
from torch_backend.hf.anatomy import additions
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.patch import state_of
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.ops import tiled_mlp as tiles
from torch_backend.ops import tiled_projections as projections
from torch_backend.ops.tiled_mlp import ACTIVATIONS, tiled_mlp
from torch_backend.ops.tiles import Projection
from torch_backend.steps import memory_fit, tiled_layers
from torch_backend.steps.cuda_graph import compile_layers
from torch_backend.steps.memory import level_layers, marked, recomputing_inside, set_level
from torch_backend.steps.tiled_layers import (
    PROBED,
    Tiles,
    can_be_tiled,
    tiled,
    tiled_modules,
    tiled_parts,
    why_not_tiled,
)

TOKENS, WIDTH, INNER, RANK = 23, 12, 40, 3


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64).mul(0.5).to(dtype).requires_grad_()


def projection(out: int, width: int, full: bool) -> Projection:
    if not full:
        return Projection(drawn(out, width))
    return Projection(drawn(out, width), drawn(out), drawn(RANK, width), drawn(out, RANK), 0.7)


def of_linear(p: Projection, x: torch.Tensor) -> torch.Tensor:
    """The linear layer by its weights joined, and not as the tiles compute it."""
    weight = p.weight if p.a is None else p.weight + p.scale * p.b @ p.a
    return F.linear(x, weight, p.bias)


OWN = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu}


@pytest.mark.parametrize("full", [False, True], ids=["weights", "biases and adapters"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_those_of_the_whole_mlp(activation: str, gated: bool, full: bool) -> None:
    torch.manual_seed(0)
    gate = projection(INNER, WIDTH, full) if gated else None
    up, down = projection(INNER, WIDTH, full), projection(WIDTH, INNER, full)
    x, dy = drawn(2, TOKENS, WIDTH), drawn(2, TOKENS, WIDTH)
    leaves = [x, *(t for p in (gate, up, down) if p is not None for t in p[:4] if t is not None)]
    raised = of_linear(up, x)
    inner = OWN[activation](raised) if gate is None else OWN[activation](of_linear(gate, x)) * raised
    whole = of_linear(down, inner)
    found = tiled_mlp(x, gate, up, down, activation=activation, tile=7)
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(whole, leaves, dy)
    for got, right in zip(torch.autograd.grad(found, leaves, dy), wanted, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-11, atol=1e-12)


def test_frozen_weights_get_no_gradient() -> None:
    torch.manual_seed(0)
    gate, up, down = (projection(*shape, True) for shape in ((INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER)))
    for p in (gate, up, down):
        p.weight.requires_grad_(False)
    tiled_mlp(drawn(TOKENS, WIDTH), gate, up, down, activation="silu", tile=7).sum().backward()
    assert all(p.weight.grad is None and p.a.grad is not None and p.b.grad is not None for p in (gate, up, down))


def test_weights_sum_their_gradients_in_float32() -> None:
    """4,096 tokens in tiles of 8: sums in bfloat16 would be 5 times further away from the exact ones."""
    torch.manual_seed(0)
    shapes = (INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER)
    exact = [Projection(drawn(*shape)) for shape in shapes]
    rounded = [Projection(p.weight.detach().bfloat16().requires_grad_()) for p in exact]
    x = drawn(4_096, WIDTH).detach()
    for given, parts in ((x.bfloat16().double(), exact), (x.bfloat16(), rounded)):
        tiled_mlp(given, *parts, activation="silu", tile=8).sum().backward()
    for p, q in zip(rounded, exact, strict=True):
        assert q.weight.grad is not None and p.weight.grad is not None
        error = (p.weight.grad.double() - q.weight.grad).norm() / q.weight.grad.norm()
        assert error < 0.01


def test_operators_are_well_formed() -> None:
    torch.manual_seed(0)
    parts = [projection(INNER, WIDTH, True), projection(INNER, WIDTH, False), projection(WIDTH, INNER, False)]
    tensors = [t if t is None else t.detach() for p in parts for t in p[:4]]
    x, options = drawn(TOKENS, WIDTH).detach(), ([1.0, 0.7, 1.0], "silu", 7)
    checked = ("test_schema", "test_faketensor")
    for weight, of_norm in ((None, []), (drawn(WIDTH).detach(), [1e-5, 1.0])):
        given = [weight, *tensors]
        needs = [True, *(t is not None for t in given)]
        run = torch.ops.crosspack.tiled_mlp_forward, torch.ops.crosspack.tiled_mlp_backward
        torch.library.opcheck(run[0], (x, given, of_norm, *options, True), test_utils=checked)
        torch.library.opcheck(run[1], (x, [x], given, of_norm, *options, True, needs), test_utils=checked)
        run = torch.ops.crosspack.tiled_projections_forward, torch.ops.crosspack.tiled_projections_backward
        dys = [drawn(TOKENS, p.weight.shape[0]).detach() for p in parts[:2]]
        read = given[:9], of_norm, [1.0, 0.7], 7
        torch.library.opcheck(run[0], (x, *read), test_utils=checked)
        torch.library.opcheck(run[1], (x, dys, *read, needs[:10]), test_utils=checked)


# -- layers ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows count as long from 64 tokens on, and tiles have 24."""
    monkeypatch.setattr(tiled_layers, "TILED_FROM", 64)
    monkeypatch.setattr(tiled_layers, "TILE", 24)


def batch(capacity: int = 128, **options: int) -> dict[str, Any]:
    given = collate(documents((5, 19, 33, 71) if capacity == 128 else (5, 19)), capacity=capacity, **options)
    return given | {n: torch.where(given[n] < 0, given[n], given[n] % 64) for n in ("input_ids", "labels")}


def adapted() -> Any:
    torch.manual_seed(0)
    names = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    return peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False))


def gradients(model: Any, given: dict[str, Any] | None = None) -> list[torch.Tensor]:
    total, weight = causal_lm_loss(model, batch() if given is None else given)
    return list(torch.autograd.grad(total / weight, [p for p in model.parameters() if p.requires_grad]))


def without_rounding(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model in float64, whose norms do not compute in float32 as those of transformers do."""
    monkeypatch.setattr(additions, "_LIBRARIES", (*additions._LIBRARIES, "tests"))
    for kind, offset in {type(m): offset_of(m) for m in model.modules() if offset_of(m) is not None}.items():

        def forward(self: Any, x: torch.Tensor, offset: Any = offset) -> torch.Tensor:
            eps = getattr(self, "variance_epsilon", getattr(self, "eps", None))
            return F.rms_norm(x, x.shape[-1:], eps=eps) * (self.weight + offset)

        monkeypatch.setattr(kind, "forward", forward)
    return in_float64(model)


def offset_of(module: nn.Module) -> float | None:
    return (tiled_layers._form_of_norm(module) or (None, None))[1]


@pytest.mark.parametrize("make", [llama, adapted, lambda: tiny("gemma3_text")], ids=["llama", "LoRA", "gemma3"])
def test_layers_give_the_same_gradients_in_float64(short: None, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = without_rounding(patch(make(), verify=False).train(), monkeypatch)
    exact = gradients(model)
    set_level(model, "full")
    modules = tiled_modules(model, 128)
    assert len(modules) == 4 and all(part.norm is not None for part in modules.values())
    with tiled(modules):
        torch.testing.assert_close(gradients(model), exact, rtol=1e-10, atol=1e-12)
    assert not any(hasattr(m, tiled_layers.STANDS_FOR) for m in model.modules())


def test_a_step_on_a_long_row_runs_by_tiles_and_a_short_one_does_not(
    graphs: SimpleNamespace, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    run = tiles._apply
    monkeypatch.setattr(tiles, "_apply", lambda x, *others: (calls.append(len(x)), run(x, *others))[1])
    losses = {}
    for level in ("none", "full"):
        model = graphs.model = patch(llama(), verify=False).train()
        step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), memory=level)  # type: ignore[arg-type]
        losses[level] = [float(step(batch(capacity))["loss"]) for capacity in (128, 32, 128)]
        assert (128 in calls) is (level == "full") and 32 not in calls
    assert losses["full"] == pytest.approx(losses["none"], rel=1e-5)


class Widest(TorchDispatchMode):
    """Notes the shapes of results with as many columns as an MLP has inside."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.inner, self.found = inner, set[int]()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape[-1:] == (self.inner,) and result.requires_grad is False:
            self.found.add(result.numel() // self.inner)
        return result


def test_no_forward_of_a_long_row_holds_its_inner_columns(graphs: SimpleNamespace, short: None) -> None:
    """Neither the first one, which asks attention before layers are compiled, nor an evaluation."""
    model = graphs.model = patch(llama(), verify=False).train()
    inner = model.config.intermediate_size
    step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), memory="full")
    with Widest(inner) as seen:
        step(batch())
        step.evaluate([batch()])
        assert 128 not in seen.found
        step(batch(40))
    assert 40 in seen.found, "a short row does"


@pytest.mark.parametrize(("inputs", "group"), [(6, 1), (3, 2), (2, 3)])
def test_layers_that_share_inputs_on_the_host_run_again_by_tiles(
    graphs: SimpleNamespace, short: None, inputs: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six layers: those behind the first one of a group run once more in the backward, by tiles too."""

    def compile(module: Any, **_: Any) -> None:
        module._compiled_call_impl = module._call_impl

    monkeypatch.setattr(nn.Module, "compile", compile)
    calls, run = [], tiles._apply
    monkeypatch.setattr(tiles, "_apply", lambda x, *others: (calls.append(len(x)), run(x, *others))[1])
    models = []
    for level in ("none", "offload"):
        made = tiny("llama", num_hidden_layers=6)
        model = graphs.model = without_rounding(patch(made, verify=False).train(), monkeypatch)
        host = inputs * 128 * memory_fit.StepMemory(model).formula().hidden
        monkeypatch.setattr(memory_fit, "host_bytes", lambda host=host: host)
        step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), memory=level, capture=False)  # type: ignore[arg-type]
        with Widest(model.config.intermediate_size) as seen:
            step(batch())
        models.append(model)
    assert step._gradients.host.group == group and len(step._gradients.host.buffers) == inputs
    # a forward without gradients that asks attention, the forward, and the backward's of all layers but leaders and
    # the last one, whose input is not made again
    again = 6 - 6 // group
    assert [tokens for tokens in calls if tokens != PROBED] == [128] * (6 + 6 + again)
    assert 128 not in seen.found
    for found, exact in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("make", [llama, adapted], ids=["llama", "LoRA"])
def test_compiled_layers_share_one_graph_with_the_operator(short: None, make: Any) -> None:
    torch._dynamo.reset()
    model = make()
    layers = model.get_submodule("base_model.model.model.layers" if make is adapted else "model.layers")
    x = torch.randn(1, 70, 32)
    whole = [layer.mlp(x) for layer in layers]
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    with tiled(dict.fromkeys((layer.mlp for layer in layers), Tiles())):
        for layer, right in zip(layers, whole, strict=True):
            layer.mlp.compile(backend=backend, fullgraph=True, dynamic=False)
            torch.testing.assert_close(layer.mlp(x), right)
    torch._dynamo.reset()
    (only,) = graphs
    assert any("autograd_function_apply" in target for target in only)


@pytest.mark.parametrize("level", ["selective", "full"])
def test_a_compiled_layer_keeps_no_inner_columns_and_has_the_same_gradients(short: None, level: Any) -> None:
    torch._dynamo.reset()
    mlp = llama().model.layers[0].mlp
    x = torch.randn(1, 70, 32, requires_grad=True)
    leaves = [x, *mlp.parameters()]
    exact = torch.autograd.grad(mlp(x).square().sum(), leaves)
    names: list[list[str]] = []
    with tiled({mlp: Tiles()}):
        mlp.compile(backend=marked(recording(names), level), fullgraph=True, dynamic=False)
        found = torch.autograd.grad(mlp(x).square().sum(), leaves)
    torch._dynamo.reset()
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)
    (kept,) = names
    assert len(kept) <= 2, "its output, and a view of its input"


@pytest.mark.slow
def test_compiled_layers_by_tiles_share_a_graph_and_keep_no_more(interpreted: None, short: None) -> None:
    model = patch(adapted(), implementation="triton", verify=False).train()
    root = causal_lm(model)
    state_of(root).guard = DeviceGuard()  # type: ignore[union-attr] # boundaries on the CPU would be read
    given = batch(max_seqlen=128, bucket=16)
    del given["packed_lengths"]
    exact = gradients(model, given)
    set_level(model, "selective")
    parts = tiled_modules(model, 128)
    assert len(parts) == 4 and all(part.norm is not None for part in parts.values())
    kept: dict[str, list[list[str]]] = {"whole": [], "by tiles": []}
    for names, modules in zip(kept.values(), ({}, parts), strict=True):
        torch._dynamo.reset()
        compile_layers(model, backend=recording(names), memory="selective")
        with recomputing_inside(level_layers(model)), tiled(modules):
            torch.testing.assert_close(gradients(model, given), exact, rtol=1e-4, atol=1e-6)
    assert len(kept["by tiles"]) == len(kept["whole"]), "one graph for each kind of layer, and the last norm's"
    assert sum(map(len, kept["by tiles"])) <= sum(map(len, kept["whole"]))


def test_tiles_compute_in_the_dtype_of_autocast(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in float32, as Trainer has them with bf16=True; products in bfloat16, and norms of float32 inputs."""
    model = patch(llama(), verify=False).train()
    parts = can_be_tiled(model)
    seen = set()
    run = projections._apply

    def forward(x: torch.Tensor, options: Any, scales: Any, tile: int, *tensors: Any) -> Any:
        seen.add((x.dtype, tensors[1].dtype))
        return run(x, options, scales, tile, *tensors)

    monkeypatch.setattr(projections, "_apply", forward)
    with torch.autocast("cpu", torch.bfloat16):
        whole = gradients(model)
        assert not seen
        with tiled(parts):
            found = gradients(model)
    assert seen == {(torch.float32, torch.bfloat16)}
    for got, right in zip(found, whole, strict=True):
        assert got.dtype == torch.float32 and (got - right).norm() <= 0.02 * right.norm()


def test_adapters_that_are_switched_off_during_a_step_run_as_they_are(short: None) -> None:
    model = patch(adapted(), verify=False).train()
    parts = can_be_tiled(model)
    with torch.no_grad(), tiled(parts), model.disable_adapter():
        found = causal_lm_loss(model, batch())[0]
    with torch.no_grad(), model.disable_adapter():
        torch.testing.assert_close(found, causal_lm_loss(model, batch())[0])


@pytest.mark.parametrize("change", ["a hook", "another norm", "its dtype", "its own forward"])
def test_another_norm_runs_whole_in_front_of_tiles(change: str) -> None:
    model = patch(llama(), verify=False)
    norm = model.model.layers[0].input_layernorm
    if change == "a hook":
        norm.register_forward_hook(lambda *_: None)
    elif change == "another norm":
        model.model.layers[0].input_layernorm = nn.LayerNorm(32)
    elif change == "its dtype":
        norm.double()
    else:
        norm.forward = norm.forward
    norms = [part.norm for module, part in can_be_tiled(model).items() if hasattr(module, "q_proj")]
    assert norms == [None, model.model.layers[1].input_layernorm]
    assert tiled_parts(model) == {"mlp"}, "the formula counts whole norms"


def test_adapters_with_dropout_run_as_they_are() -> None:
    config = peft.LoraConfig(r=4, target_modules=["up_proj"], lora_dropout=0.1)
    model = peft.get_peft_model(llama(), config)
    assert len(tiled_modules(model, 10**6)) == 0
    mlp = model.base_model.model.model.layers[0].mlp
    assert why_not_tiled(mlp) == "its linear layers are not plain, nor plain with adapters"
