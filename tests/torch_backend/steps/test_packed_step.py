"""The fast training step of enable_packing: losses and updates of the step that the trainer has without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn import functional as F

from packing_core.errors import UnsupportedError
from tests.torch_backend.graphs import graphs as graphs
from tests.torch_backend.models import PLAIN_SGD
from tests.torch_backend.trainers.test_trainer import CAPACITY, differences, documents, gpt_oss, llama, peft
from torch_backend import explain
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.trainers import fast_step as packed_step
from torch_backend.trainers.enable_packing import enable_packing

FAST = "without logits"
OF_THE_TRAINER = ("compute_loss_func", "compute_metrics", "callbacks")


def built(folder: Path, fast: bool, make: Callable[[], Any] = llama, kind: Any = None, **options: Any) -> Any:
    """A trainer after enable_packing."""
    own = {name: options.pop(name) for name in OF_THE_TRAINER if name in options}
    given = transformers.TrainingArguments(str(folder), **PLAIN_SGD | options)
    given._n_gpu = min(given.n_gpu, 1)  # several in one process would be DataParallel
    kind = kind or transformers.Trainer
    trainer = kind(make(), given, train_dataset=documents(), eval_dataset=documents(6), **own)
    return enable_packing(trainer, capacity=CAPACITY, verify=False, fast=fast)


def trained(trainer: Any, **options: Any) -> list[dict[str, float]]:
    """Trains, and returns the logs without times."""
    torch.manual_seed(1)
    trainer.train(**options)
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_mean")
    return [{name: entry[name] for name in names if name in entry} for entry in trainer.state.log_history]


def assert_same(fast: Any, plain: Any, make: Callable[[], Any] = llama, tolerance: float = 1e-6) -> None:
    """Both trainers log the same and do the same when they train, and they train something."""
    for found, wanted in zip(trained(fast), trained(plain), strict=True):
        assert found == pytest.approx(wanted, rel=10 * tolerance, abs=tolerance)
    assert differences(fast.model, plain.model) < tolerance
    assert differences(plain.model, make()) > 1e-4


def adapted(**options: Any) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False, **options)
    return peft.get_peft_model(llama(), config)


def routed() -> Any:
    model = gpt_oss()
    model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.01
    return model


def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


class Doubled(transformers.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        return super().compute_loss(model, inputs, return_outputs, **more) * 2


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "accumulation": ({"gradient_accumulation_steps": 3}, FAST),
    "clipping and a schedule": ({"max_grad_norm": 0.1, "lr_scheduler_type": "linear"}, FAST),
    "gradient checkpointing": ({"activation_checkpointing": True}, FAST),
    "no accumulation, Adam": ({"gradient_accumulation_steps": 1, "optim": "adamw_torch", "adam_epsilon": 1.0}, FAST),
    "tokens of one device": ({"average_tokens_across_devices": False}, FAST),
    "label smoothing": ({"label_smoothing_factor": 0.1}, "with logits: label smoothing reads them"),
    "compute_loss_func": ({"compute_loss_func": own_loss}, "with logits: compute_loss_func reads them"),
    "compute_loss": ({"kind": Doubled}, "with logits: Doubled computes its loss itself (compute_loss)"),
    "NEFTune": ({"neftune_noise_alpha": 5.0}, FAST),
    "LoRA": ({"make": adapted}, FAST),
    "DoRA": ({"make": partial(adapted, use_dora=True)}, FAST),
    "per-document scans": ({"make": gpt_oss}, FAST),
    "router loss": ({"make": routed}, "with logits: the trainer adds the router's auxiliary loss of each microbatch"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_losses_and_updates_are_those_of_the_plain_step(name: str, tmp_path: Path) -> None:
    options, loss = OPTIONS[name]
    fast, plain = (built(tmp_path / str(kind), kind, **options) for kind in (True, False))
    assert_same(fast, plain, options.get("make", llama))
    assert fast.packed_step.parts["loss"].startswith(loss)


@pytest.mark.parametrize("options", [{"make": lambda: llama().bfloat16()}, {"bf16": True}], ids=["weights", "autocast"])
def test_in_bfloat16_they_differ_by_rounding(options: dict[str, Any], tmp_path: Path) -> None:
    fast, plain = (built(tmp_path / str(kind), kind, **options) for kind in (True, False))
    assert_same(fast, plain, options.get("make", llama), tolerance=1e-2)
    assert fast.packed_step.parts["loss"] == FAST


# -- evaluation, callbacks, checkpoints --------------------------------------------------------------------------------


def test_evaluation_has_logits_where_somebody_reads_them(tmp_path: Path) -> None:
    def metrics(prediction: Any) -> dict[str, float]:
        return {"mean": float(prediction.predictions.mean())}

    options = {"compute_metrics": metrics, "eval_strategy": "steps", "eval_steps": 1}
    fast, plain = (built(tmp_path / str(kind), kind, **options) for kind in (True, False))
    assert_same(fast, plain)
    assert all("eval_mean" in entry for entry in fast.state.log_history if "eval_loss" in entry)
    found, wanted = (trainer.predict(documents(4)).predictions for trainer in (fast, plain))
    assert found.shape == wanted.shape and found == pytest.approx(wanted, abs=1e-5)


def test_evaluation_of_the_loss_alone_makes_no_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(model: Any, batch: Any) -> Any:
        calls.append(1)
        return causal_lm_loss(model, batch)

    fast, plain = (built(tmp_path / str(kind), kind) for kind in (True, False))
    monkeypatch.setattr(packed_step, "causal_lm_loss", counted)
    assert fast.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], abs=1e-5)
    assert calls
    calls.clear()
    assert len(fast.predict(documents(4)).predictions) and not calls


def test_a_callback_stops_it_and_a_checkpoint_goes_on_where_it_stopped(tmp_path: Path) -> None:
    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 2

    options = {"save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch", "adam_epsilon": 1.0}
    whole = built(tmp_path / "whole", True, **options)
    trained(whole)
    stopped = built(tmp_path / "cut", True, callbacks=[Stop()], **options)
    trained(stopped)
    assert stopped.state.global_step == 2
    resumed = built(tmp_path / "cut", True, **options)
    trained(resumed, resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-2"))
    assert resumed.state.global_step == 3
    assert differences(whole.model, resumed.model) < 1e-6


def test_training_twice_goes_on(tmp_path: Path) -> None:
    fast, plain = (built(tmp_path / str(kind), kind) for kind in (True, False))
    for trainer in (fast, plain):
        trained(trainer)
    assert_same(fast, plain)


# -- graphs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 3])
def test_as_cuda_graphs_it_trains_the_same(graphs: SimpleNamespace, accumulation: int, tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": accumulation, "max_steps": 5, "max_grad_norm": 0.5}
    fast, plain = (built(tmp_path / str(kind), kind, **options) for kind in (True, False))
    graphs.model = fast.model
    assert_same(fast, plain)
    assert graphs.recorded >= min(accumulation, 2) and graphs.replayed >= 2
    assert fast.packed_step.parts == {"loss": FAST, "layers": "compiled", "graph": "CUDA graph"}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"label_smoothing_factor": 0.1}, "the loss is the trainer's own"),
        ({"torch_empty_cache_steps": 1}, "torch_empty_cache_steps empties the cache during the step"),
        ({"neftune_noise_alpha": 5.0}, "the noise of NEFTune depends on the documents of a batch"),
    ],
)
def test_what_forbids_a_graph(graphs: SimpleNamespace, options: Any, reason: str, tmp_path: Path) -> None:
    fast, plain = (built(tmp_path / str(kind), kind, **options) for kind in (True, False))
    assert_same(fast, plain)
    assert fast.packed_step.parts["graph"] == f"no CUDA graph: {reason}"


def test_the_model_is_compiled_as_a_whole_where_its_layers_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is traced here; the slow test below trains."""
    for layers, reason in ((True, None), (False, "it is on no GPU")):
        monkeypatch.setattr(packed_step, "why_not_compiled", lambda model, reason=reason: reason)
        trainer = built(tmp_path, True, torch_compile=True, torch_compile_backend="eager")
        prepared = trainer.accelerator.prepare_model(trainer.model)
        assert isinstance(prepared, OptimizedModule) is not layers
        assert trainer.packed_step.in_place_of_compile is layers


@pytest.mark.slow
def test_torch_compile_gives_way_to_compiled_layers(graphs: SimpleNamespace, tmp_path: Path) -> None:
    fast = built(tmp_path / "fast", True, torch_compile=True, torch_compile_backend="eager", max_steps=4)
    graphs.model = fast.model
    assert_same(fast, built(tmp_path / "plain", False, max_steps=4))
    assert not isinstance(fast.model_wrapped, OptimizedModule)
    assert graphs.replayed
    layers = "compiled, one by one, in place of the model as a whole (torch_compile=True)"
    assert f"layers of the step: {layers}" in explain(fast).notes


@pytest.mark.slow
@pytest.mark.parametrize("faked", [True, False], ids=["fixed shapes", "as on this machine"])
def test_auto_find_batch_size_goes_on_with_smaller_batches(
    faked: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    graphs = request.getfixturevalue("graphs") if faked else SimpleNamespace()

    def small() -> Any:
        model = llama()

        def refuse(module: Any, args: Any, kwargs: Any) -> None:
            if kwargs["input_ids"].shape[0] > 1 and torch.is_grad_enabled():
                raise torch.OutOfMemoryError("CUDA out of memory.")

        model.register_forward_pre_hook(refuse, with_kwargs=True)
        return model

    options = {"auto_find_batch_size": True, "max_steps": 5, "make": small}
    fast, plain = (built(tmp_path / str(kind), kind, **options) for kind in (True, False))
    graphs.model = fast.model
    assert_same(fast, plain)
    assert fast._train_batch_size == plain._train_batch_size == 1
    assert not faked or graphs.replayed


# -- explain, audit, and the plain step --------------------------------------------------------------------------------


def test_explain_says_what_is_fast_before_and_after_a_step(tmp_path: Path) -> None:
    trainer = built(tmp_path, True)
    assert "loss of the step: decided at the first step" in str(explain(trainer))
    trained(trainer)
    notes = explain(trainer).notes
    assert "loss of the step: without logits" in notes
    if not torch.cuda.is_available():
        assert "layers of the step: not compiled: the model computes on cpu" in notes
    rows = (
        "trains 24 documents, in 8 rows of 40 tokens, 89.4% full, by PackedCollator in place of default_data_collator"
    )
    assert rows in notes
    assert explain(built(tmp_path, False)).notes[-1] == "the training step is the trainer's own: fast=False"
    with pytest.raises(UnsupportedError, match="a trainer after enable_packing"):
        explain(object())


def test_without_fast_the_trainer_keeps_its_methods(tmp_path: Path) -> None:
    trainer = built(tmp_path, False)
    assert not {"training_step", "compute_loss", "packed_step"} & set(vars(trainer))
    summed = trainer.prediction_step.args[0]  # whose rows become those of documents
    assert summed.args[0].__func__ is transformers.Trainer.prediction_step


def test_enabling_twice_is_enabling_once(tmp_path: Path) -> None:
    trainer = built(tmp_path, True)
    attributes, wrapped = set(vars(trainer)), trainer.packed_step.stock_step
    again = enable_packing(trainer, verify=False)
    assert isinstance(again.packed_step, packed_step.PackedStep) and set(vars(again)) == attributes
    assert again.packed_step.stock_step == wrapped  # and not the first call's step
