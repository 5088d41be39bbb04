"""TRL's trainers over tiny models, and what they compute when every document is in a forward of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from tests.torch_backend.hf.test_conditions import CHANGES
from tests.torch_backend.models import PLAIN_SGD, tiny
from torch_backend.auditing.compare import gradients_error, relative_error
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.trainers.enable_packing import enable_packing

GRADIENT = "gradient of "
ROUTES = ("qwen3", "gpt_oss", "qwen3_5_text", "phi3", "falcon_alibi")
WORDS = 96
MoreOf = Callable[[Tensor, Tensor, dict[str, Any]], list[dict[str, Any]]]


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Splits a text at blanks; the words are w0 (padding), w1, w2 (end of text), ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2", "unk_token": "w3"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)


def model_of(family: str, seed: int = 0, **changes: Any) -> Any:
    """A tiny model of the family. A router's auxiliary loss, a statistic of the whole batch, is off."""
    if family in ("gpt_oss", "qwen3_moe"):
        changes.setdefault("router_aux_loss_coef", 0.0)
    return tiny(family, seed, **CHANGES.get(family, {}), **changes)


def text(rng: np.random.Generator, low: int, high: int) -> str:
    return " ".join(f"w{i}" for i in rng.integers(4, 90, rng.integers(low, high)))


def pairs(count: int = 8, seed: int = 0) -> Any:
    """Prompts of 2 to 9 words, and two answers of 2 to 39 for each."""
    import datasets

    rng = np.random.default_rng(seed)
    rows = [
        {"prompt": text(rng, 2, 10), "chosen": f" {text(rng, 2, 40)} w2", "rejected": f" {text(rng, 2, 40)} w2"}
        for _ in range(count)
    ]
    return datasets.Dataset.from_list(rows)


def arguments(kind: Any, path: Any, **options: Any) -> Any:
    """Steps of plain SGD, everything logged."""
    defaults = {
        "max_steps": 1,
        "learning_rate": 0.02,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
    }
    return kind(output_dir=str(path), **{**PLAIN_SGD, **defaults, **options})


def one_document_per_call(model: nn.Module, more_of: MoreOf | None = None) -> None:
    """Make a model run the rows of each padded batch one by one, without their padding.

    ``more_of(input_ids, mask, kwargs)`` gives the further arguments of each row; by default each has those of the call.
    """
    root = causal_lm(model)
    stock = root.forward

    @functools.wraps(stock)
    def forward(input_ids: Tensor, attention_mask: Tensor | None = None, labels: Any = None, **kwargs: Any) -> Any:
        if attention_mask is None or kwargs.get("past_key_values") is not None or kwargs.get("use_cache"):
            return stock(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs)
        width, outputs = input_ids.shape[1], []
        more = [kwargs] * len(input_ids) if more_of is None else more_of(input_ids, attention_mask.bool(), kwargs)
        for row, mask in enumerate(attention_mask.bool()):
            start = int(mask.int().argmax())
            alone = {"input_ids": input_ids[row, mask][None]}
            if labels is not None:
                alone["labels"] = labels[row, mask][None]
            output = stock(**alone, **{k: v for k, v in more[row].items() if k != "margin"})
            for name, value in output.items():
                if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] >= int(mask.sum()) - 1:
                    missing = alone["input_ids"].shape[1] - value.shape[1]
                    whole = value.new_zeros(1, width - missing, *value.shape[2:])
                    end = start + value.shape[1]
                    output[name] = torch.cat((whole[:, :start], value, whole[:, end:]), 1)
            outputs.append(output)
        joined = {
            name: torch.cat([output[name] for output in outputs])
            for name, value in outputs[0].items()
            if isinstance(value, Tensor) and value.ndim > 1
        }
        return type(outputs[0])(**joined)

    root.forward = forward


class _Gradients(transformers.TrainerCallback):
    """Keeps the gradients of every step."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        self.found |= {f"{GRADIENT}{name} in step {state.global_step}": x for name, x in gradients.items()}


def trained(trainer: Any) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """The gradients of every step, the weights afterwards, and the logs."""
    recorder = _Gradients()
    trainer.add_callback(recorder)
    trainer.train()
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    weights |= recorder.found
    timed = ("runtime", "per_second", "total_flos", "step_time", "epoch")
    logs = [{k: v for k, v in log.items() if not any(t in k for t in timed)} for log in trainer.state.log_history]
    return weights, logs


def assert_same_training(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    """Gradients, weights and every logged figure agree: max error / max."""
    (weights, logs), (true_weights, true_logs) = got, want
    assert weights.keys() == true_weights.keys()
    gradients = {name: x for name, x in true_weights.items() if name.startswith(GRADIENT)}
    difference, worst = gradients_error({name: weights[name] for name in gradients}, gradients)
    assert difference <= tolerance, f"{worst}: {difference:.1e}"
    for name in weights.keys() - gradients.keys():
        difference = relative_error(weights[name], true_weights[name])
        assert difference <= tolerance, f"{name}: {difference:.1e}"
    assert len(logs) == len(true_logs)
    for log, truth in zip(logs, true_logs, strict=True):
        assert log.keys() == truth.keys()
        for name, value in truth.items():
            assert abs(log[name] - value) <= 10 * tolerance * max(1.0, abs(value)), f"{name}: {log[name]} {value}"


def divide(trainer: Any, more_of: MoreOf | None = None) -> Any:
    """Lets the models of a trainer run every document in a forward of its own."""
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is not None:
            one_document_per_call(model, more_of)
    return trainer


def alone(trainer: Any) -> Any:
    return trained(divide(trainer))


def packed(trainer: Any, **options: Any) -> Any:
    return trained(enable_packing(trainer, verify=False, **options))


def assert_packed_is_alone(make: Callable[..., Any], *args: Any, **options: Any) -> None:
    """A trainer that is packed trains as one whose documents are alone."""
    assert_same_training(packed(make(*args, **options)), alone(make(*args, **options)))
