"""The fast step inside TRL's SFTTrainer: losses, updates and token counts of the trainer without it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.torch_backend.graphs import graphs as graphs
from tests.torch_backend.models import PLAIN_SGD
from tests.torch_backend.steps.test_packed_step import FAST, assert_same, trained
from tests.torch_backend.trainers.test_trainer import (
    CAPACITY,
    arguments,
    datasets,
    differences,
    documents,
    gpt_oss,
    llama,
    peft,
    tiny_tokenizer,
    trl,
)
from torch_backend import explain
from torch_backend.trainers import fast_step as packed_step
from torch_backend.trainers.enable_packing import enable_packing

DEFAULTS = {"shuffle_dataset": False, "bf16": False, "gradient_checkpointing": False}
TRL_PACKS = {"packing": True, "max_length": CAPACITY}


def words(*lengths: int) -> str:
    return " ".join(f"w{number}" for length in lengths for number in range(5, 5 + length))


def completions() -> Any:
    pairs = [(words(3 + i % 4), words(2 + i % 9)) for i in range(24)]
    return datasets.Dataset.from_list([{"prompt": prompt + " ", "completion": text} for prompt, text in pairs])


def chats() -> Any:
    def turn(role: str, length: int) -> dict[str, str]:
        return {"role": role, "content": words(length)}

    talks = [[turn("user", 2 + i % 3), turn("assistant", 1 + i % 7)] for i in range(24)]
    return datasets.Dataset.from_list([{"messages": talk} for talk in talks])


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + ' w2 ' }}{% endgeneration %}"
    "{% else %}{{ m.content + ' ' }}{% endif %}{% endfor %}"
)


def tokenizer() -> Any:
    from tokenizers import pre_tokenizers

    made = tiny_tokenizer()
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    made.chat_template = TEMPLATE
    return made


def built(folder: Path, fast: bool, **options: Any) -> Any:
    """An SFTTrainer after enable_packing; without TRL's packing its documents are packed here."""
    data = options.pop("data", documents)()
    own = {name: options.pop(name) for name in ("peft_config", "callbacks") if name in options}
    make = options.pop("make", llama)
    given = trl.SFTConfig(str(folder), **PLAIN_SGD | DEFAULTS | options)
    given._n_gpu = min(given.n_gpu, 1)  # several in one process would be DataParallel
    data = data.remove_columns([name for name in data.column_names if name == "comment"])
    torch.manual_seed(2)  # of adapters
    trainer = trl.SFTTrainer(
        make(), given, train_dataset=data, eval_dataset=data.select(range(6)), processing_class=tokenizer(), **own
    )
    capacity = None if given.packing else CAPACITY
    return enable_packing(trainer, capacity=capacity, verify=False, fast=fast)


def both(folder: Path, **options: Any) -> tuple[Any, Any]:
    fast, plain = (built(folder / str(kind), kind, **options) for kind in (True, False))
    return fast, plain


def lora(**options: Any) -> Any:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False, **options)


def lora_on_experts() -> Any:
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    return peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=parameters, init_lora_weights=False)


TRL_LOSS = "with logits: loss_type='dft' is a loss of TRL's own"
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "documents": ({}, FAST),
    "TRL's packing": (TRL_PACKS, FAST),
    "completions only": ({"data": completions, **TRL_PACKS}, FAST),
    "assistant turns only": ({"data": chats, "assistant_only_loss": True, **TRL_PACKS}, FAST),
    "DoRA, TRL's packing": ({"peft_config": lora(use_dora=True), **TRL_PACKS}, FAST),
    "DFT": ({"loss_type": "dft"}, TRL_LOSS),
    "LoRA on experts": ({"make": gpt_oss, "peft_config": lora_on_experts()}, FAST),
    "router loss": ({"make": gpt_oss, "router_aux_loss_coef": 0.01}, "with logits: the trainer adds the router's"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_losses_and_updates_are_those_of_the_plain_step(name: str, tmp_path: Path) -> None:
    options, loss = OPTIONS[name]
    fast, plain = both(tmp_path, **options)
    before = {key: x.detach().clone() for key, x in fast.model.named_parameters()}
    for found, wanted in zip(trained(fast), trained(plain), strict=True):
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert differences(fast.model, plain.model) < 1e-6
    assert max(float((x.detach() - before[key]).abs().max()) for key, x in plain.model.named_parameters()) > 1e-4
    assert fast.packed_step.parts["loss"].startswith(loss)
    logged = [entry for entry in fast.state.log_history if "loss" in entry]
    assert all(("mean_token_accuracy" in entry) == (loss != FAST) for entry in logged)


def test_tokens_are_counted_without_padding(graphs: SimpleNamespace, tmp_path: Path) -> None:
    """TRL's own count takes the padding of rows for tokens."""
    trainer = built(tmp_path, True, num_train_epochs=1, max_steps=-1, eval_strategy="epoch")
    graphs.model = trainer.model
    trained(trainer)
    tokens = sum(map(len, documents()["input_ids"]))
    assert trainer.train_dataset.num_rows == 24
    logged = [entry for entry in trainer.state.log_history if "num_tokens" in entry]
    assert logged[-1]["num_tokens"] == tokens and logged[0]["num_tokens"] < tokens
    assert [entry["eval_num_tokens"] for entry in trainer.state.log_history if "eval_loss" in entry] == [tokens]


def test_evaluation_logs_all_that_it_logs_without_the_fast_step(tmp_path: Path) -> None:
    fast, plain = both(tmp_path, eval_strategy="steps", eval_steps=2)
    assert_same(fast, plain)
    names = ("eval_loss", "eval_entropy", "eval_mean_token_accuracy")
    found, wanted = (
        [{name: entry[name] for name in names} for entry in trainer.state.log_history if "eval_loss" in entry]
        for trainer in (fast, plain)
    )
    assert found and found == [pytest.approx(entry, rel=1e-5) for entry in wanted]


@pytest.mark.parametrize("packing", [False, True], ids=["documents", "TRL's packing"])
def test_as_cuda_graphs_it_trains_the_same_with_one_form(
    graphs: SimpleNamespace, packing: bool, tmp_path: Path
) -> None:
    options = {"max_steps": 6, "gradient_accumulation_steps": 1, **(TRL_PACKS if packing else {})}
    fast, plain = both(tmp_path, **options)
    graphs.model = fast.model
    assert_same(fast, plain)
    assert (graphs.recorded, graphs.replayed) == (1, 4)
    assert fast.packed_step.parts == {
        "loss": FAST,
        "layers": "compiled",
        "graph": "CUDA graph",
        "metrics": packed_step.LEFT_OUT,
    }
    assert f"metrics of the step: {packed_step.LEFT_OUT}" in explain(fast).notes


def test_room_in_the_rows_of_trl_is_worth_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two documents of 20 tokens fill a row of 40; all 24 of them do not fill one of 1,000."""

    def halves() -> Any:
        return datasets.Dataset.from_dict({"input_ids": [list(range(5, 5 + CAPACITY // 2))] * 24})

    for length, full in ((CAPACITY, True), (1000, False)):
        caplog.clear()
        built(tmp_path, True, data=halves, packing=True, max_length=length)
        said = [text for text in caplog.messages if f"TRL's rows of {length} tokens are 48% full" in text]
        assert len(said) == (not full) and full != ("TRL's rows" in caplog.text)


@pytest.mark.parametrize("packing", [False, True])
def test_prompts_are_trained_where_the_trainer_trains_them(tmp_path: Path, packing: bool) -> None:
    """By completion_only_loss=False, with TRL's packing and without."""
    options = {**DEFAULTS, "max_length": CAPACITY, "completion_only_loss": False, "packing": packing}
    args = arguments(trl.SFTConfig, tmp_path, **options)
    trainer = trl.SFTTrainer(llama(), args, train_dataset=completions(), processing_class=tokenizer())
    wanted = sum(len(ids) - 1 for ids in trainer.train_dataset["input_ids"])
    if packing:
        wanted = sum(sum(lengths) - len(lengths) for lengths in trainer.train_dataset["seq_lengths"])
    enable_packing(trainer, verify=False)
    assert sum(int((batch["labels"] != -100).sum()) for batch in trainer.get_train_dataloader()) == wanted


def test_tokens_are_counted_in_all_rows_of_a_batch_without_the_fast_step(tmp_path: Path) -> None:
    """TRL counts the first row alone where a batch has no mask."""
    trainer = built(tmp_path, fast=False, max_steps=1)
    batches: list[Any] = []
    collator = trainer.data_collator
    trainer.data_collator = lambda rows: batches.append(collator(rows)) or batches[-1]
    trainer.train()
    count = trainer.args.gradient_accumulation_steps
    wanted = sum(sum(len(ids) for ids in documents_in(batch)) for batch in batches[:count])
    assert trainer.state.log_history[0]["num_tokens"] == wanted and len(batches[0]["input_ids"]) > 1


def documents_in(batch: Any) -> list[Any]:
    tokens = batch["input_ids"].flatten().split(batch["packed_lengths"])
    return [tokens[segment] for (segment,) in batch["packed_documents"]]
