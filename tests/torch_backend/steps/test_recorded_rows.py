"""CUDA graphs of packed calls of any length: the same hidden states and gradients, whatever happens between calls.

On the CPU a recording only remembers what it would have recorded; replaying runs it on the memory of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.torch_backend.graphs import compiled as compiled
from tests.torch_backend.graphs import graphs as graphs
from tests.torch_backend.hf.test_encoders import encoder
from tests.torch_backend.models import documents, error, tiny
from tests.torch_backend.steps.test_packed_calls import possible as possible
from torch_backend import patch
from torch_backend.hf.patch import state_of
from torch_backend.hf.unpadding import unpad_calls
from torch_backend.steps import recorded_rows
from torch_backend.steps.cuda_graph import record
from torch_backend.steps.dynamic_compile import RECORDED, UNNEEDED, CompiledCalls

pytestmark = pytest.mark.usefixtures("possible")
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 514}
NO_RANDOM_STATE = "no CUDA graph: dropout or noise in layers that recompute reads the random state"
SIZES = [(20, 9), (18, 11), (25, 5, 3), (30, 30), (19, 10), (22, 8), (20, 9), (64, 3)]


def padded(lengths: tuple[int, ...], seed: int = 0) -> dict[str, Tensor]:
    """A padded batch of documents."""
    ids = nn.utils.rnn.pad_sequence(documents(lengths, seed=seed), batch_first=True)
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long()}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(**batch)
    if (pooled := getattr(output, "pooler_output", None)) is not None:
        return pooled.sin().square().mean() + output.last_hidden_state[:, 0].sin().mean()
    if output.logits.ndim == 2:
        return output.logits.sin().square().mean()
    return (output.logits.sin() * batch["attention_mask"][..., None]).sum() / batch["attention_mask"].sum()


def twins(family: str = "qwen2", **options: Any) -> tuple[nn.Module, nn.Module, CompiledCalls]:
    """A model whose calls are recorded, an equal one whose calls are not, and who records them."""
    recorded, plain = (patch(tiny(family, **options), verify=False).train() for _ in range(2))
    for model in (recorded, plain):
        unpad_calls(model, always=True)
    return recorded, plain, CompiledCalls(recorded)


def assert_same_gradients(one: nn.Module, other: nn.Module, bound: float = 1e-6) -> None:
    for (name, x), y in zip(one.named_parameters(), other.parameters(), strict=True):
        assert (x.grad is None) == (y.grad is None), name
        if x.grad is not None:
            assert error(x.grad.cpu(), y.grad.cpu()) <= bound, name


@pytest.mark.parametrize("auto", ["AutoModel", "AutoModelForSequenceClassification"])
@pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
def test_poolers_and_heads_of_documents_run_behind_the_graph(compiled: SimpleNamespace, family: str, auto: str) -> None:
    recorded, plain = (
        patch(encoder(family, getattr(transformers, auto), **NO_DROPOUT), verify=False) for _ in range(2)
    )
    plain.load_state_dict(recorded.state_dict())
    for model in (recorded.train(), plain.train()):
        unpad_calls(model, always=True)
    calls = CompiledCalls(recorded)
    for step, lengths in enumerate(SIZES):
        losses = []
        for model in (recorded, plain):
            output = model(**padded(lengths, seed=step))
            of_documents = output.pooler_output if auto == "AutoModel" else output.logits
            assert len(of_documents) == len(lengths)
            losses.append(of_documents.sin().square().sum())
            if auto == "AutoModel" and step % 2:  # else nothing reads these
                losses[-1] = losses[-1] + output.last_hidden_state.sin().sum()
            losses[-1].backward()
        assert error(losses[0].detach(), losses[1].detach()) <= 1e-6
        assert_same_gradients(recorded, plain, 1e-5)
    assert calls.graph == RECORDED and compiled.replayed > 0


def test_a_pooler_of_several_parts_keeps_a_model_from_graphs(compiled: SimpleNamespace) -> None:
    """Albert applies an activation to what its pooler returns."""
    model = patch(encoder("albert", transformers.AutoModel), verify=False).train()
    unpad_calls(model, always=True)
    calls = CompiledCalls(model)
    for _ in range(3):
        assert len(model(**padded((9, 5))).pooler_output) == 2
    assert calls.graph == "no CUDA graph: its decoder returns more than the last hidden states"


def poison(calls: CompiledCalls) -> None:
    """Let nothing be read from the graphs' memory that was not written since."""
    assert calls.recorded is not None
    for kept in calls.recorded.memory.hidden.values():
        kept.fill_(torch.nan)


@pytest.mark.parametrize("tied", [False, True])
def test_steps_of_several_calls_have_the_gradients_of_plain_ones(compiled: SimpleNamespace, tied: bool) -> None:
    recorded, plain, calls = twins(tie_word_embeddings=tied)
    for step in range(4):
        for number in range(2):
            batch = padded(SIZES[2 * step + number], seed=step)
            for model in (recorded, plain):
                loss = loss_of(model, batch)
                with torch.no_grad():  # as a reference would, between forward and backward
                    assert error(loss_of(recorded, padded((7, 12))), loss_of(plain, padded((7, 12)))) <= 1e-6
                if model is recorded and calls.recorded is not None:
                    poison(calls)
                loss.backward()
            assert_same_gradients(recorded, plain)
        for model in (recorded, plain):
            model.zero_grad(set_to_none=step % 2 == 0)
    assert calls.graph == RECORDED
    assert compiled.replayed >= 8


def test_a_call_before_the_backward_of_another_runs_as_usual(compiled: SimpleNamespace) -> None:
    recorded, plain, _ = twins()
    for _ in range(3):
        for model in (recorded, plain):
            model.zero_grad()
            first, second = (loss_of(model, padded(lengths)) for lengths in ((20, 9), (18, 11)))
            (first + second * 2).backward()
        assert_same_gradients(recorded, plain)
    assert compiled.replayed > 0


def test_a_forward_without_backward_does_not_hold_up_the_next_one(compiled: SimpleNamespace) -> None:
    recorded, _, calls = twins()
    for _ in range(4):
        loss_of(recorded, padded((20, 9)))
    assert calls.recorded is not None and not calls.recorded.memory.busy
    assert compiled.replayed == 3


def test_a_second_backward_of_one_call_is_refused(compiled: SimpleNamespace) -> None:
    recorded, _, _ = twins()
    for _ in range(3):
        loss = loss_of(recorded, padded((20, 9)))
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="were overwritten by a later one"):
        loss.backward()


def test_few_forms_are_recorded(compiled: SimpleNamespace) -> None:
    """Shorter rows run the graphs of longer ones until their form has come often."""
    recorded, _, calls = twins()
    with torch.no_grad():
        for length in (100, 110, 110, 90, 90, 90):
            recorded(**padded((length,) * 4))
        assert compiled.recorded == 1
        for _ in range(2):
            recorded(**padded((90,) * 4))
    assert compiled.recorded == 2
    assert calls.graph == RECORDED


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("declined", [None, 0.05])
def test_rows_without_shared_prefixes_run_the_graphs_of_rows_with_them(
    compiled: SimpleNamespace, declined: float | None
) -> None:
    """Runs those after the first row with them, and from the first row on where some would have saved too little."""
    recorded = patch(tiny("llama", num_hidden_layers=1), implementation="triton", verify=False)
    plain = patch(tiny("llama", num_hidden_layers=1), verify=False)
    calls = CompiledCalls(recorded)
    unpad_calls(recorded, always=True, share_prefix=True)
    unpad_calls(plain, always=True)
    apart = padded((24, 24))
    together = {name: x.clone() for name, x in apart.items()}
    together["input_ids"][1, :17] = together["input_ids"][0, :17]
    apart = {name: x[:, :18] for name, x in apart.items()}  # in rows of the same form
    state_of(recorded).unpadding.prefixes.declined = declined
    for number, batch in enumerate((together, together, apart) if declined is None else (apart, apart, together)):
        with torch.no_grad():
            assert error(recorded(**batch).logits, plain(**batch).logits) <= 1e-5, number
    assert (calls.graph, compiled.recorded) == (RECORDED, 1)


def test_adapters_that_are_off_have_graphs_of_their_own(compiled: SimpleNamespace) -> None:
    peft = pytest.importorskip("peft")
    models = []
    for base in twins()[:2]:
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        models.append(patch(peft.get_peft_model(base, config), verify=False))
    recorded, plain = models
    calls = CompiledCalls(recorded)
    for lengths in SIZES[:5] * 2:
        batch, losses = padded(lengths), []
        for model in models:
            model.zero_grad()
            loss = loss_of(model, batch)
            with torch.no_grad(), model.disable_adapter():
                base = loss_of(model, batch)
            loss.backward()
            losses.append([loss.item(), base.item()])
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        assert losses[0][0] != pytest.approx(losses[0][1], rel=1e-3)
        assert_same_gradients(recorded, plain)
    assert calls.graph == RECORDED


def test_weights_that_are_frozen_later_get_no_gradient(compiled: SimpleNamespace) -> None:
    recorded, plain, _ = twins()
    for step in range(6):
        for model in (recorded, plain):
            model.zero_grad()
            model.get_input_embeddings().requires_grad_(step < 3)
            loss_of(model, padded((20, 9))).backward()
        assert_same_gradients(recorded, plain)


def test_what_no_layer_reads_has_no_gradient(compiled: SimpleNamespace) -> None:
    """An optimizer would decay it where its gradient is 0."""
    recorded, plain, _ = twins()
    for model in (recorded, plain):
        model.model.spare = nn.Parameter(torch.ones(3))
    for _ in range(3):
        for model in (recorded, plain):
            loss_of(model, padded((20, 9))).backward()
        assert_same_gradients(recorded, plain)
    assert compiled.replayed and recorded.model.spare.grad is None


def test_weights_that_are_exchanged_are_read(compiled: SimpleNamespace) -> None:
    recorded, plain, _ = twins()
    for step in range(5):
        for model in (recorded, plain):
            model.zero_grad()
            weight = model.model.norm.weight
            model.model.norm.weight = nn.Parameter(weight.detach() * 1.5) if step == 3 else weight
            loss_of(model, padded((20, 9))).backward()
        assert_same_gradients(recorded, plain)


def test_a_head_over_frozen_layers_is_trained(compiled: SimpleNamespace) -> None:
    recorded, plain, _ = twins()
    for model in (recorded, plain):
        model.model.requires_grad_(False)
    for _ in range(3):
        for model in (recorded, plain):
            loss_of(model, padded((20, 9))).backward()
        assert_same_gradients(recorded, plain)
    assert compiled.replayed


def test_hooks_that_read_gradients_forbid_graphs(compiled: SimpleNamespace) -> None:
    """Also those that come after calls were recorded."""
    recorded, plain, calls = twins()
    seen: list[nn.Parameter] = []
    for step in range(5):
        if step == 3:
            assert calls.graph == RECORDED and compiled.replayed
            next(recorded.parameters()).register_post_accumulate_grad_hook(seen.append)
        for model in (recorded, plain):
            loss_of(model, padded((20, 9))).backward()
        assert_same_gradients(recorded, plain)
    assert len(seen) == 2
    assert calls.graph == "no CUDA graph: hooks of its parameters read gradients"


def test_what_cannot_be_recorded_runs_as_usual_and_says_why(
    compiled: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(recorded_rows, "record", fail)
    recorded, plain, calls = twins()
    for _ in range(3):
        for model in (recorded, plain):
            loss_of(model, padded((20, 9))).backward()
    assert_same_gradients(recorded, plain)
    assert calls.graph == "no CUDA graph: recording it failed, operation not permitted when stream is capturing"


def test_rows_that_keep_the_device_busier_than_the_host_are_not_recorded(
    compiled: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, plain, calls = twins()
    monkeypatch.setattr(recorded_rows.CallTimer, "waited", False)
    for number, lengths in enumerate([(20, 9), (18, 11), (20, 9), (19, 10)]):
        for model in (recorded, plain):
            loss_of(model, padded(lengths, seed=number)).backward()
        assert_same_gradients(recorded, plain)
    assert calls.recorded is not None and not any(calls.recorded.graphs.values())
    assert calls.graph == UNNEEDED
    monkeypatch.setattr(recorded_rows.CallTimer, "waited", True)
    for _ in range(2):
        loss_of(recorded, padded((20, 9))).backward()
    assert calls.graph == RECORDED


@pytest.mark.gpu
@pytest.mark.parametrize(
    "setting",
    ["plain", "checkpointing", "adapters", "autocast", "shared prefixes", "experts", "dropout", "pooler", "class"],
)
def test_graphs_on_a_gpu_train_as_plain_layers_do(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_rows, "record", _record_without_compiling)
    monkeypatch.setattr(recorded_rows.CallTimer, "waited", True)  # whatever else the GPU does beside the test
    cast = torch.autocast("cuda", torch.bfloat16) if setting == "autocast" else nullcontext()
    models = list(_on_gpu(setting))
    calls = CompiledCalls(models[0])
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=1e-3) for m in models]
    for number, lengths in enumerate([*SIZES, (300, 200), (310, 190), (64, 400), (280, 190)] * 2):
        batch = {name: x.cuda() for name, x in padded(lengths, seed=number).items()}
        if setting == "shared prefixes" and number % 3 < 2:
            batch["input_ids"][1:, :17] = batch["input_ids"][:1, :17]
        losses = []
        for model in models:
            with cast:
                loss = loss_of(model, batch)
                with torch.no_grad():
                    loss_of(model, {name: x[:1] for name, x in batch.items()})
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=2e-2 if setting == "autocast" else 1e-4, abs=1e-2)
        assert_same_gradients(*models, 5e-2 if setting == "autocast" else 1e-3)
        if number % 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert calls.graph == (NO_RANDOM_STATE if setting == "dropout" else RECORDED)


def _record_without_compiling(*args: Any, **kwargs: Any) -> Any:
    """As ``record``; kernels that are compiled for large rows try configurations, which no recording allows."""
    before = counters["stats"]["unique_graphs"]
    result = record(*args, **kwargs)
    assert counters["stats"]["unique_graphs"] == before
    return result


def _on_gpu(setting: str) -> Iterator[nn.Module]:
    for _ in range(2):
        torch.manual_seed(0)
        model: Any = tiny("qwen3_moe" if setting == "experts" else "qwen2")
        if setting in ("pooler", "class"):
            auto = transformers.AutoModel if setting == "pooler" else transformers.AutoModelForSequenceClassification
            model = encoder("xlm-roberta", auto, **NO_DROPOUT)
            for name, p in model.named_parameters():
                p.requires_grad_(not name.endswith("key.bias"))  # whose gradient is the rounding of 0
        model = model.cuda().train()
        if setting == "adapters":
            peft = pytest.importorskip("peft")
            model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4))
        if setting in ("checkpointing", "adapters", "dropout"):
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        patch(model, implementation="triton", verify=False)
        if setting == "dropout":
            for layer in model.model.layers:
                layer.self_attn.attention_dropout = 0.0
                layer.mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(1e-9))
        unpad_calls(model, always=True, share_prefix=setting == "shared prefixes")
        yield model
