"""make_train_step: a step is the step of all its documents, however they are cut into microbatches."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import torch_backend
from packing_core import PackedDataset
from packing_core.errors import LayoutError, PackingError, UnsupportedError
from tests.torch_backend.graphs import graphs as graphs
from tests.torch_backend.models import alone, collate, documents, tiny
from tests.torch_backend.training_steps import LENGTHS, SKEWED, WHOLE, batches, distance, patched, steps
from torch_backend import explain, make_train_step, normalise, patch
from torch_backend.hf.anatomy.structure import in_mode
from torch_backend.losses.causal_lm import causal_lm_loss


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "qwen3_5_text", "falcon_alibi"])
def test_a_step_is_the_step_of_its_documents_however_they_are_cut(family: str) -> None:
    right = alone(tiny(family), documents(LENGTHS))
    start, found = tiny(family), {}
    for name, cuts in (("whole", WHOLE), ("skewed", SKEWED)):
        model = found[name] = patched(family)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        metrics = make_train_step(model, optimizer)(batches(cuts))
        assert metrics["tokens"] == sum(LENGTHS) - len(LENGTHS)
        torch.testing.assert_close(metrics["loss"], right.loss)
        norm = torch.stack([gradient.norm() for gradient in right.gradients.values()]).norm()
        torch.testing.assert_close(metrics["grad_norm"], norm)
        before = dict(start.named_parameters())
        for key, parameter in model.named_parameters():
            if key in right.gradients:
                torch.testing.assert_close(parameter, before[key] - 0.1 * right.gradients[key], rtol=1e-5, atol=1e-6)
    assert distance(found["whole"], found["skewed"]) < 1e-6


def test_weights_whose_sum_is_below_zero_divide_a_step_too() -> None:
    model, (batch,) = patched(), batches(WHOLE)
    weights = torch.where(batch["labels"] % 3 == 0, 0.5, -1.0)
    right = normalise(*causal_lm_loss(model, batch, weights=weights)).detach()
    step, weighted = make_train_step(model, torch.optim.SGD(model.parameters())), {**batch, "loss_weights": weights}
    torch.testing.assert_close(step.evaluate([weighted])["loss"].float(), right)
    torch.testing.assert_close(step(weighted)["loss"], right)


def test_it_clips_and_follows_a_schedule() -> None:
    model, right = patched(), patched()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (count + 1))
    step = make_train_step(model, optimizer, scheduler=schedule, max_grad_norm=0.1)
    (batch,) = batches(WHOLE)
    for rate in (0.5, 0.25):
        metrics = step(batch)
        assert metrics["learning_rate"] == rate
        right.zero_grad()
        right(**batch).loss.backward()
        assert metrics["grad_norm"] == pytest.approx(float(nn.utils.clip_grad_norm_(right.parameters(), 0.1)))
        with torch.no_grad():
            for parameter in right.parameters():
                parameter -= rate * parameter.grad
    assert distance(model, right) < 1e-6


def test_a_model_whose_loss_needs_logits_trains_with_its_own() -> None:
    one, other = patched(), patched()
    own = other.loss_function  # a user's function of the same values, which causal_lm_loss refuses
    other.loss_function = lambda *args, **kwargs: own(*args, **kwargs)
    found, wanted = steps(other, [batches(SKEWED)] * 2), steps(one, [batches(SKEWED)] * 2)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y)
    assert distance(one, other) < 1e-6
    step = make_train_step(other, torch.optim.SGD(other.parameters()))
    step(batches(WHOLE))
    assert step.parts["loss"].startswith("with logits: Qwen2ForCausalLM has a loss function of its own")


def test_a_token_classifier_counts_every_label() -> None:
    from transformers import Qwen2ForTokenClassification

    docs = [{"input_ids": d.tolist(), "labels": [int(x) % 3 for x in d]} for d in documents(LENGTHS)]
    config = tiny("qwen2").config
    config.num_labels, config.classifier_dropout = 3, 0.0

    def trained(cuts: list[slice]) -> tuple[dict[str, Any], nn.Module]:
        torch.manual_seed(0)
        model = patch(Qwen2ForTokenClassification(config).train(), verify=False)
        collator = torch_backend.PackedCollator(model, capacity=64)
        return steps(model, [[collator(docs[cut]) for cut in cuts]])[0], model

    (one, whole), (other, cut) = trained(WHOLE), trained(SKEWED)
    assert one["tokens"] == other["tokens"] == sum(LENGTHS)
    torch.testing.assert_close(one["loss"], other["loss"])
    assert distance(whole, cut) < 1e-6


@pytest.mark.parametrize("own_loss", [False, True])
def test_without_targets_only_weight_decay_acts(own_loss: bool) -> None:
    model, before = patched(), patched()
    if own_loss:
        own = model.loss_function
        model.loss_function = lambda *args, **kwargs: own(*args, **kwargs)
    (batch,) = batches(WHOLE)
    nothing = batch | {"labels": torch.full_like(batch["labels"], -100)}
    step = make_train_step(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    metrics = step(nothing)
    assert metrics["loss"] == metrics["tokens"] == metrics["grad_norm"] == 0
    evaluation = step.evaluate([nothing])
    assert evaluation["loss"] == evaluation["tokens"] == 0
    with torch.no_grad():
        for parameter in before.parameters():
            parameter *= 1 - 0.1 * 0.5
    assert distance(model, before) < 1e-7
    # one of several microbatches without targets changes nothing
    both, one = (steps(patched(), [given])[0] for given in ([nothing, batch], [batch]))
    torch.testing.assert_close(both, one)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_evaluation_gives_every_module_its_own_mode_back(training: bool, fails: bool) -> None:
    model = patched("gpt2").train(training)
    model.transformer.h[0].train(not training)
    model.transformer.h[0].mlp.dropout.train(training)
    before = {name: module.training for name, module in model.named_modules()}
    step = make_train_step(model, torch.optim.SGD(model.parameters()))
    (batch,) = batches(WHOLE)
    with pytest.raises(KeyError) if fails else nullcontext():
        step.evaluate([batch, {}] if fails else [batch])
    assert {name: module.training for name, module in model.named_modules()} == before


def test_a_module_that_does_more_than_set_its_mode_is_called_on_the_way_back() -> None:
    class Merging(nn.Linear):  # as loralib's layers merge in evaluation
        merged = False

        def train(self, mode: bool = True) -> Merging:
            self.merged = not mode
            return super().train(mode)

    model = nn.Sequential(Merging(2, 2), nn.Dropout()).train()
    model[1].eval()
    with in_mode(model, training=False):
        assert model[0].merged
    assert not model[0].merged and model[0].training and not model[1].training


def test_autocast_runs_the_forward_in_bfloat16() -> None:
    (batch,) = batches(WHOLE)
    model = patched()
    dtypes = set()
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    metrics = steps(model, [[batch]], autocast=torch.bfloat16)[0]
    assert dtypes == {torch.bfloat16} and model.lm_head.weight.grad.dtype == torch.float32
    torch.testing.assert_close(metrics["loss"], steps(patched(), [[batch]])[0]["loss"], rtol=1e-2, atol=0)


def test_the_loss_of_a_step_is_float32_whatever_the_default_is() -> None:
    model, (batch,) = patched(), batches(WHOLE)
    step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.0))
    want = step(batch)["loss"]
    torch.set_default_dtype(torch.float16)
    try:
        assert torch.equal(step(batch)["loss"], want) and want.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_first_step_draws_no_random_numbers_of_its_own() -> None:
    def trained() -> tuple[nn.Module, Any]:
        torch.manual_seed(3)
        model = patch(tiny("gpt2", attn_pdrop=0.0, embd_pdrop=0.5, resid_pdrop=0.0), verify=False)
        return model, torch.get_rng_state()

    (model, state), (plain, _) = trained(), trained()
    (batch,) = batches(WHOLE)
    torch.set_rng_state(state)
    loss = steps(model, [[batch]])[0]["loss"]
    torch.set_rng_state(state)
    torch.testing.assert_close(loss, plain(**batch).loss.detach())


# -- what cannot be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nothing", [[], [{"input_ids": torch.ones(1, 4)}]])
def test_a_step_needs_batches_with_labels(nothing: Any) -> None:
    model = patched()
    with pytest.raises(LayoutError, match="a step takes a batch with labels, or a list of at least one"):
        make_train_step(model, torch.optim.SGD(model.parameters()))(nothing)


@pytest.mark.parametrize("option", ["compile", "capture"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is possible")
def test_what_is_not_possible_is_refused_where_it_is_demanded_and_explained_where_not(option: str) -> None:
    model = patched()
    with pytest.raises(UnsupportedError, match=rf"{option}=True is not possible, because the model computes on cpu: "):
        steps(model, [batches(WHOLE)], **{option: True})
    step = make_train_step(model, torch.optim.SGD(model.parameters()), **{option: False})
    step(batches(WHOLE))
    part = {"compile": "layers", "capture": "graph"}[option]
    assert step.parts[part].endswith(f"{option}=False")
    assert f"{part} of the step: {step.parts[part]}" in explain(step).notes


def test_an_engine_of_deepspeed_is_refused_by_name() -> None:
    engine = type("DeepSpeedEngine", (torch.nn.Module,), {})
    with pytest.raises(UnsupportedError, match="cannot train a DeepSpeedEngine, .* itself: use a Trainer with"):
        make_train_step(type("Engine", (engine,), {})(), torch.optim.SGD([torch.zeros(1)]))


def test_the_guides_step_trains(graphs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The block of docs/speed.md as it stands, but smaller, on the CPU, and compiled by nobody."""
    page = (Path(__file__).parents[3] / "docs/speed.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    smaller = {".cuda()": "", "16_384": "128", "2_048": "64"}
    smaller |= {"metrics = step(batch)": "losses.append(float(step(batch)['loss']))"}
    smaller |= {"step = make_train_step(": "graphs.model = model\nstep = make_train_step("}
    for shown, tried in smaller.items():
        assert shown in code
        code = code.replace(shown, tried)
    monkeypatch.chdir(tmp_path)
    tiny("qwen2").save_pretrained("my-model")
    losses: list[float] = []
    exec(code, {"losses": losses, "graphs": graphs})
    assert len(losses) > 6 and all(0 < loss < 10 for loss in losses) and len(set(losses)) == len(losses)
    assert graphs.recorded == 1 and graphs.replayed > 3


def weighted_batches(model: nn.Module, docs: list[Any]) -> list[dict[str, Any]]:
    """Rows whose documents weigh the same, one row in each batch."""
    rows = PackedDataset([doc.tolist() for doc in docs], 40, weighting="document", seed=0)
    collate = torch_backend.PackedCollator(model)
    return [collate([rows[row]]) for row in range(len(rows))]


def test_documents_of_equal_weight_train_as_the_mean_over_documents() -> None:
    docs, model, wanted = documents(), patched(), tiny("qwen2")
    given = weighted_batches(model, docs)
    assert len(given) > 1
    step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=1.0))
    metrics = step(given)
    losses = torch.stack([wanted(doc[None], labels=doc[None]).loss for doc in docs if len(doc) > 1])
    losses.mean().backward()
    losses = losses.detach()
    torch.optim.SGD(wanted.parameters(), lr=1.0).step()
    assert float(metrics["loss"]) == pytest.approx(float(losses.mean()), rel=1e-5)
    assert int(metrics["tokens"]) == sum(len(doc) - 1 for doc in docs)
    assert distance(model, wanted) < 1e-5
    model.load_state_dict(tiny("qwen2").state_dict())
    assert float(step.evaluate(given)["loss"]) == pytest.approx(float(losses.mean()), rel=1e-5)


def test_weights_that_no_loss_would_count_are_refused() -> None:
    model = patched()
    batch = weighted_batches(model, documents())[0]
    with pytest.raises(UnsupportedError, match="came with loss_weights.*make_train_step"):
        model(**batch)
    with pytest.raises(LayoutError, match="the batch has loss_weights, and weights were passed"):
        causal_lm_loss(model, batch, weights=batch["loss_weights"])
    classifier = torch_backend.PackedCollator(tiny("qwen2"), masking=object())
    with pytest.raises(UnsupportedError, match='pack with weighting="token"'):
        classifier([PackedDataset([[5, 6, 7]], 8, weighting="document")[0]])


def test_weights_and_a_router_loss_are_refused_before_the_weights_move() -> None:
    model = patched("mixtral")
    model.config.output_router_logits = True
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(UnsupportedError, match="a router or indexers add a loss that has no weights"):
        step(weighted_batches(model, documents())[0])
    assert all(torch.equal(before[name], weight) for name, weight in model.named_parameters())


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "refusal"),
    [
        (torch.optim.LBFGS, None, "LBFGS.step needs closure"),
        (torch.optim.SGD, torch.optim.lr_scheduler.ReduceLROnPlateau, "ReduceLROnPlateau.step needs metrics"),
        (lambda _: torch.optim.SGD(tiny("qwen2").parameters()), None, "no trained parameter of this Qwen2ForCausalLM"),
        (
            torch.optim.SGD,
            lambda _: torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.zeros(1)])),
            "the ConstantLR belongs to another optimizer",
        ),
    ],
    ids=["LBFGS", "plateau", "another model's", "another optimizer's"],
)
def test_what_could_not_take_the_step_is_refused_before_it(optimizer: Any, scheduler: Any, refusal: str) -> None:
    model = patched()
    made = optimizer(model.parameters())
    with pytest.raises(UnsupportedError, match=refusal):
        make_train_step(model, made, scheduler=scheduler and scheduler(made))


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0: pass a norm above 0, or None"),
        ({"max_grad_norm": -1.0}, "max_grad_norm is -1.0"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm is nan"),
        ({"max_grad_norm": "1"}, "max_grad_norm is '1'"),
        ({"autocast": torch.float16}, "autocast=torch.float16 needs a loss scaler"),
        ({"autocast": torch.float32}, "autocast=torch.float32: pass torch.bfloat16, or None"),
    ],
)
def test_options_that_train_nothing_or_something_else_are_refused(options: dict[str, Any], refusal: str) -> None:
    model = patched()
    with pytest.raises(PackingError, match=re.escape(refusal)):
        make_train_step(model, torch.optim.SGD(model.parameters()), **options)


def test_trained_weights_in_float16_are_refused_and_frozen_ones_are_not() -> None:
    model = patched().half()
    with pytest.raises(UnsupportedError, match="trained weights in float16"):
        make_train_step(model, torch.optim.SGD(model.parameters()))
    model.lm_head.float()
    for name, weight in model.named_parameters():
        weight.requires_grad_(name.startswith("lm_head"))
    make_train_step(model, torch.optim.SGD(model.lm_head.parameters()))


def test_a_norm_that_is_never_reached_clips_nothing() -> None:
    one, other = patched(), patched()
    steps(one, [batches(WHOLE)], max_grad_norm=float("inf"))
    steps(other, [batches(WHOLE)])
    assert distance(one, other) == 0


def test_a_frozen_model_is_refused_at_the_start_and_later() -> None:
    model = patched()
    optimizer = torch.optim.SGD(model.parameters())
    step, batch = make_train_step(model, optimizer), collate(documents())
    step(batch)
    model.requires_grad_(False)
    with pytest.raises(UnsupportedError, match="every parameter of Qwen2ForCausalLM is frozen"):
        step(batch)
    with pytest.raises(UnsupportedError, match="every parameter of Qwen2ForCausalLM is frozen"):
        make_train_step(model, optimizer)


def test_wrapped_optimizers_and_schedulers_take_the_step() -> None:
    model = patched()
    accelerator = Accelerator(cpu=True)
    accelerator.gradient_state._set_sync_gradients(True)  # of the process, whatever ran in it before
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    halved = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer, halved = accelerator.prepare(optimizer, halved)
    step = make_train_step(model, optimizer, scheduler=halved)
    assert [float(step(collate(documents()))["learning_rate"]) for _ in range(2)] == [0.5, 0.25]
