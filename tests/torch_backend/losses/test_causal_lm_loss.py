"""The loss without logits is the model's own, whatever its output layer is and whatever wraps it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils import parametrize
from transformers import Qwen2ForCausalLM

import torch_backend
from packing_core.errors import LayoutError, UnsupportedModelError
from tests.torch_backend.models import collate, documents, tiny
from torch_backend.losses import output_layer
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.losses.cross_entropy import next_token_targets, packed_cross_entropy
from torch_backend.losses.distillation import causal_lm_divergence
from torch_backend.packed_tokens import plain


@pytest.fixture
def batch() -> dict[str, Any]:
    return collate(documents((5, 9, 3)))


def loss_of_logits(model: nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return packed_cross_entropy(logits, next_token_targets(batch["labels"]))


def assert_loss_of_logits(model: nn.Module, batch: dict[str, Any]) -> None:
    """Loss, weight and every gradient; both start from the same random state."""
    torch.manual_seed(0)
    right, weight = loss_of_logits(model, batch)
    torch.manual_seed(0)
    loss, total = causal_lm_loss(model, batch)
    torch.testing.assert_close(loss, right)
    assert total == weight
    parameters = [p for p in model.parameters() if p.requires_grad]
    found, want = (torch.autograd.grad(x, parameters, allow_unused=True) for x in (loss, right))
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen2", "gemma2", "granite", "cohere", "falcon_h1", "gpt2", "phi", "minicpm3", "recurrent_gemma"],
)
def test_it_is_the_loss_of_the_logits(family, batch):
    assert_loss_of_logits(torch_backend.patch(tiny(family), verify=False), batch)


def test_weights_stand_at_the_tokens_of_their_labels(batch):
    model = torch_backend.patch(tiny("qwen2"), verify=False)
    weights = torch.rand(batch["labels"].shape)
    without_some = {**batch, "labels": batch["labels"].masked_fill(weights < 0.5, -100)}
    found = causal_lm_loss(model, batch, weights=(weights >= 0.5).float())
    right = causal_lm_loss(model, without_some)
    torch.testing.assert_close(found[0], right[0])
    assert found[1] == right[1]


def test_weights_of_both_signs_may_add_up_to_nothing(batch):
    model = torch_backend.patch(tiny("qwen2"), verify=False)
    weights = torch.zeros(batch["labels"].shape)
    weights[0, 1], weights[0, 6] = 1.0, -1.0
    losses = []
    for place in (1, 6):
        only = torch.full_like(batch["labels"], -100)
        only[0, place] = batch["labels"][0, place]
        losses.append(causal_lm_loss(model, {**batch, "labels": only})[0])
    loss, total = causal_lm_loss(model, batch, weights=weights)
    torch.testing.assert_close(loss, losses[0] - losses[1])
    assert total == 0


def test_a_batch_without_targets_has_no_loss(batch):
    model = torch_backend.patch(tiny("qwen2"), verify=False)
    loss, total = causal_lm_loss(model, {**batch, "labels": torch.full_like(batch["labels"], -100)})
    loss.backward()
    assert loss == total == 0
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_autocast_and_training_mode_are_kept(batch):
    model = torch_backend.patch(tiny("qwen2").train(), verify=False)
    with torch.autocast("cpu", torch.bfloat16):
        loss, total = causal_lm_loss(model, batch)
        right, _ = loss_of_logits(model, batch)
    assert model.training
    torch.testing.assert_close(loss / total, right / total, rtol=1e-2, atol=0)


def test_nothing_stays_on_the_model(batch):
    model = torch_backend.patch(tiny("qwen2"), verify=False)
    before = [(name, type(m), sorted(m.__dict__), list(m._modules)) for name, m in model.named_modules()]
    causal_lm_loss(model, batch)
    with pytest.raises(LayoutError, match="seq_idx"):
        causal_lm_loss(model, {name: plain(batch[name]) for name in ("input_ids", "labels", "seq_idx")})
    assert [(name, type(m), sorted(m.__dict__), list(m._modules)) for name, m in model.named_modules()] == before


# -- output layers -----------------------------------------------------------------------------------------------------


class Quantised(nn.Linear):
    """An output layer with a forward of its own, as those of quantisation libraries have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight.round(decimals=1).detach() + 0 * self.weight)


def with_bias(model: Any) -> Any:
    model.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, model.lm_head.out_features))
    return model


def with_forward_hook(model: Any) -> Any:
    model.lm_head.register_forward_hook(lambda module, args, logits: logits.clamp(max=0.5))
    return model


def with_pre_hook(model: Any) -> Any:
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    return model


def with_own_forward(model: Any) -> Any:
    before = model.lm_head.forward
    model.lm_head.forward = lambda x: before(x) * 2
    return model


def parametrised(model: Any) -> Any:
    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    parametrize.register_parametrization(model.lm_head, "weight", Doubled())
    return model


def quantised(model: Any) -> Any:
    model.lm_head.__class__ = Quantised
    return model


def adapted(**options: Any) -> Callable[[Any], Any]:
    from peft import LoraConfig, get_peft_model

    options = {"target_modules": ["lm_head"], "init_lora_weights": False, **options}
    return lambda model: get_peft_model(model, LoraConfig(r=4, **options))


HEADS = {
    "a bias": with_bias,
    "a forward hook": with_forward_hook,
    "a forward pre-hook": with_pre_hook,
    "a forward of its own": with_own_forward,
    "a parametrised weight": parametrised,
    "quantised": quantised,
    "LoRA": adapted(),
    "LoRA with dropout": adapted(lora_dropout=0.5),
    "DoRA": adapted(use_dora=True),
    "LoRA and a trained copy": adapted(target_modules=["q_proj"], modules_to_save=["lm_head"]),
}


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])  # the latter with tied embeddings and a softcap
@pytest.mark.parametrize("head", HEADS)
def test_every_output_layer_counts(head: str, family: str, batch: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(output_layer, "CHUNK_BYTES", 11 * 96 * 4)  # 11 tokens at a time, if not by the kernel
    model = HEADS[head](tiny(family))
    assert_loss_of_logits(torch_backend.patch(model, verify=False), batch)


@pytest.mark.parametrize("head", HEADS)
def test_an_output_layer_that_changes_between_calls_counts(head: str, batch: dict[str, Any]):
    model = torch_backend.patch(tiny("qwen2"), verify=False)
    causal_lm_loss(model, batch)
    assert_loss_of_logits(HEADS[head](model), batch)


def test_logits_of_other_layers_are_made_a_chunk_at_a_time(batch, monkeypatch):
    monkeypatch.setattr(output_layer, "CHUNK_BYTES", 11 * 96 * 4)
    model, seen = tiny("qwen2"), []
    model.lm_head.register_forward_hook(lambda module, args, logits: seen.append(logits.shape[:-1].numel()))
    loss, _ = causal_lm_loss(torch_backend.patch(model, verify=False), batch)
    assert seen == [11] * 5 + [9]
    loss.backward()
    assert sorted(seen) == 2 * [9] + 10 * [11]  # made again in the backward


# -- wrappers ----------------------------------------------------------------------------------------------------------


def test_a_prepared_model_keeps_its_autocast(batch):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    model = torch_backend.patch(tiny("qwen2"), verify=False)
    full, _ = causal_lm_loss(model, batch)
    AcceleratorState._reset_state(reset_partial_state=True)  # what another test's trainer left
    try:
        prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
        loss, _ = causal_lm_loss(prepared, batch)
        right, _ = loss_of_logits(prepared, batch)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert loss.dtype == torch.float32 and loss != full
    torch.testing.assert_close(loss, right, rtol=1e-2, atol=0)


@pytest.mark.slow
def test_a_compiled_model_is_compiled_once():
    model = tiny("qwen2")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for seed in range(2):
        ids = torch.stack(documents((20, 20), seed))
        batch = {"input_ids": ids, "labels": ids}
        loss, right = causal_lm_loss(compiled, batch)[0], causal_lm_loss(model, batch)[0]
        gradients = [torch.autograd.grad(x, list(model.parameters())) for x in (loss, right)]
        torch.testing.assert_close([loss, *gradients[0]], [right, *gradients[1]])
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_a_compiled_step_around_it_is_left_to_run_as_it_is(batch):
    model = torch_backend.patch(tiny("qwen2"), verify=False)
    step = torch.compile(lambda batch: causal_lm_loss(model, batch)[0] * 2, backend="eager")
    torch.testing.assert_close(step(batch), 2 * causal_lm_loss(model, batch)[0])


# -- what is refused ---------------------------------------------------------------------------------------------------


class Squared(Qwen2ForCausalLM):
    """Does something of its own to its logits."""

    def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.lm_head(self.model(input_ids=input_ids, **kwargs).last_hidden_state) ** 2
        return (self.loss_function(logits, labels, self.config.vocab_size), logits)


class Twice(Squared):
    """Has a second head, as models that predict several tokens do."""

    def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        losses = [self.loss_function(self.lm_head(x), labels, self.config.vocab_size) for x in (hidden, hidden[:, 1:])]
        return (sum(losses),)


class Inline(Squared):
    """Does not take its loss from ``loss_function``."""

    def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.lm_head(self.model(input_ids=input_ids, **kwargs).last_hidden_state)
        return (torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),)


class Functional(Squared):
    """Does not call its output layer."""

    def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        logits = torch.nn.functional.linear(hidden, self.lm_head.weight)
        return (self.loss_function(logits, labels, self.config.vocab_size),)


@pytest.mark.parametrize(
    ("model_class", "reason"),
    [
        (Squared, "Squared does more to its logits than a scale and a softcap"),
        (Twice, "Twice calls its output layer more than once"),
        (Inline, "Inline does not make its loss by loss_function"),
        (Functional, "Functional does not make one loss of one output layer"),
    ],
)
def test_a_model_that_makes_its_loss_otherwise_is_refused(model_class, reason):
    model = model_class(tiny("qwen2").config)
    ids = torch.stack(documents((9, 9)))
    with pytest.raises(UnsupportedModelError, match=rf"{reason}: use its logits, packed_cross_entropy\(\.\.\.\)"):
        causal_lm_loss(model, {"input_ids": ids, "labels": ids})


def test_a_loss_function_of_the_user_is_refused_and_stays(batch):
    model = torch_backend.patch(tiny("qwen2"), verify=False)
    own = model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.mean()
    with pytest.raises(UnsupportedModelError, match="Qwen2ForCausalLM has a loss function of its own: use its logits"):
        causal_lm_loss(model, batch)
    assert model.loss_function is own


def test_a_model_that_is_not_patched_is_refused_with_boundaries_beside_plain_tokens(batch):
    """Other collators mark boundaries, and their tokens know nothing of them."""
    batch = plain(batch)
    model, teacher = torch_backend.patch(tiny("qwen2"), verify=False), tiny("qwen2")
    for loss in (
        lambda: causal_lm_loss(teacher, batch),
        lambda: torch_backend.token_logprobs(teacher, batch),
        lambda: causal_lm_divergence(model, teacher, batch),
    ):
        with pytest.raises(UnsupportedModelError, match="a packed batch reached a model that is not patched"):
            loss()


def test_what_has_no_output_layer_is_refused(batch):
    with pytest.raises(UnsupportedModelError, match="Qwen2Model has no output layer"):
        causal_lm_loss(tiny("qwen2").model, batch)


def test_a_layer_that_zero_3_holds_is_refused(batch):
    model = torch_backend.patch(tiny("qwen2"), verify=False)
    model.lm_head.weight.ds_id = 7
    with pytest.raises(UnsupportedModelError, match="weight of the output layer is partitioned by ZeRO-3: use the"):
        causal_lm_loss(model, batch)


def test_a_distributed_weight_that_no_forward_gathers_is_refused(batch):
    model = torch_backend.patch(tiny("qwen2"), verify=False)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        weight = distribute_tensor(model.lm_head.weight.detach(), init_device_mesh("cpu", (1,)), [Shard(0)])
        model.lm_head.weight = nn.Parameter(weight)
        with pytest.raises(UnsupportedModelError, match="a DTensor that no forward gathers: pass the module"):
            causal_lm_loss(model, batch)
    finally:
        dist.destroy_process_group()


def test_a_batch_without_labels_is_refused(batch):
    del batch["labels"]
    with pytest.raises(LayoutError, match="causal_lm_loss takes a batch with labels, got input_ids, "):
        causal_lm_loss(tiny("qwen2"), batch)


class Holder(nn.Module):
    """Holds a model and returns what ``returned`` makes of its output."""

    def __init__(self, model: Any, returned: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model, self.returned = model, returned

    def forward(self, **batch: Any) -> Any:
        return self.returned(self.model(**batch))


@pytest.mark.parametrize(
    "returned",
    [
        lambda output: {"logits": output.logits, "loss": output.loss},
        lambda output: (output.loss, output.logits),
        lambda output: output.loss,
    ],
    ids=["a dict", "a tuple", "the loss"],
)
def test_a_wrapper_may_return_its_loss_in_a_form_of_its_own(batch, returned):
    model = torch_backend.patch(tiny("qwen2"), verify=False)
    (found, weight), (right, count) = causal_lm_loss(Holder(model, returned), batch), causal_lm_loss(model, batch)
    assert found == right and weight == count


def penalty(output: Any) -> Any:
    output.loss = output.loss + 1e-3 * output.logits.logsumexp(-1).pow(2).mean()
    return output


def accuracy(output: Any) -> Any:
    return {"loss": output.loss, "likely": output.logits.argmax(-1)}


def watched(model: Any) -> Any:
    model.register_forward_hook(lambda module, args, output: output.logits.max() and None)
    return model


def of_a_subclass(model: Any) -> Any:
    class Penalised(type(model)):
        def forward(self, **batch: Any) -> Any:
            return penalty(super().forward(**batch))

    model.__class__ = Penalised
    return model


@pytest.mark.parametrize(
    "reads",
    [lambda model: Holder(model, penalty), lambda model: Holder(model, accuracy), watched, of_a_subclass],
    ids=["a penalty", "an accuracy", "a hook", "a subclass"],
)
def test_a_stand_in_for_logits_that_are_read_is_refused(batch, reads):
    model = reads(torch_backend.patch(tiny("qwen2"), verify=False))
    causal_lm_loss(torch_backend.patch(tiny("qwen2"), verify=False), batch)
    with pytest.raises(UnsupportedModelError, match="reads its logits beside its loss: use its logits"):
        causal_lm_loss(model, batch)


def test_a_wrapper_without_a_loss_is_refused_by_what_it_returns(batch):
    model = Holder(torch_backend.patch(tiny("qwen2"), verify=False), lambda output: {"total": output.loss})
    with pytest.raises(UnsupportedModelError, match="the model returned total and no loss"):
        causal_lm_loss(model, batch)
