"""enable_packing and pack_dataset inside Trainer and SFTTrainer: every step is the step of its documents alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional as F

from packing_core import PackedDataset
from packing_core.errors import CapacityError, LayoutError, PackingError
from tests.torch_backend.models import PLAIN_SGD
from torch_backend import with_boundaries
from torch_backend.trainers.enable_packing import enable_packing
from torch_backend.trainers.hf_dataset import pack_dataset

datasets = pytest.importorskip("datasets", reason="trainers take their data as datasets")
trl = pytest.importorskip("trl", reason="half of these tests are about its SFTTrainer")
peft = pytest.importorskip("peft", reason="SFTTrainer applies adapters")

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CAPACITY = 40


def llama() -> torch.nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, initializer_range=0.2))


def gpt_oss() -> torch.nn.Module:
    """A family that SFTTrainer trains contaminated without an error."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        **TINY,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=2,
        sliding_window=6,
        initializer_range=0.2,
        router_aux_loss_coef=0.0,  # a statistic of the whole batch by definition, so no document's own
    )
    return transformers.GptOssForCausalLM(config)


def documents(count: int = 24) -> datasets.Dataset:
    """Random documents of 3 to 20 tokens whose first third is a prompt."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 64, length).tolist() for length in rng.integers(3, 21, count)]
    labels = [[-100] * (len(x) // 3) + x[len(x) // 3 :] for x in ids]
    return datasets.Dataset.from_dict({"input_ids": ids, "labels": labels, "comment": ["unused"] * count})


class Recorder:
    """Keeps the batches that a collator makes."""

    def __init__(self, collator) -> None:
        self.collator, self.batches = collator, []

    def __call__(self, features):
        self.batches.append(self.collator(features))
        return self.batches[-1]


def arguments(kind, tmp_path, **options):
    return kind(output_dir=str(tmp_path), **{**PLAIN_SGD, **options})


def train_recorded(trainer) -> tuple[list[float], list[dict]]:
    """Train; the logged losses and the batches in the order they were trained on."""
    recorder = trainer.data_collator = Recorder(trainer.data_collator)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, recorder.batches


def per_document_losses(model, batches, accumulation: int = 2) -> list[float]:
    """The same steps with every document in a forward of its own, and the loss divided once per step."""
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    losses = []
    for first in range(0, 3 * accumulation, accumulation):
        total, count = torch.zeros(()), 0
        for batch in batches[first : first + accumulation]:
            ids, labels = batch["input_ids"].flatten(), batch["labels"].flatten()
            for document, targets in zip(
                ids.split(batch["packed_lengths"]), labels.split(batch["packed_lengths"]), strict=True
            ):
                logits = model(input_ids=document[None], use_cache=False).logits[0]
                total = total + F.cross_entropy(logits[:-1], targets[1:], ignore_index=-100, reduction="sum")
                count += int((targets[1:] != -100).sum())
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append(float(total.detach()) / count)
    return losses


def differences(one, other) -> float:
    pairs = zip(one.named_parameters(), other.named_parameters(), strict=True)
    return float(torch.stack([(a - b).detach().abs().max() for (_, a), (_, b) in pairs]).max())  # NaN where one is


NLL = {"loss_type": "nll", "bf16": False}
PACKED = {**NLL, "packing": True, "max_length": CAPACITY}
OURS = {**NLL, "padding_free": True, "max_length": None}


def plain(model, path, data):
    return transformers.Trainer(model, arguments(transformers.TrainingArguments, path), train_dataset=data)


TRAINERS = {
    "documents": (llama, lambda model, path: plain(model, path, documents()), {"capacity": CAPACITY}),
    "a packed data set": (
        llama,
        lambda model, path: plain(model, path, PackedDataset(list(documents()["input_ids"]), CAPACITY)),
        {},
    ),
    "SFT": (llama, lambda model, path: sft(model, path, documents(), max_length=CAPACITY, **NLL), {}),
    "SFT of our rows": (
        llama,
        lambda model, path: sft(model, path, pack_dataset(documents(), CAPACITY), **OURS),
        {},
    ),
    "SFT that packs": (
        gpt_oss,
        lambda model, path: sft(model, path, documents(), gradient_checkpointing=True, **PACKED),
        {},
    ),
}


@pytest.mark.parametrize("kind", TRAINERS)
def test_every_step_is_that_of_its_documents_alone(tmp_path, kind) -> None:
    build, made, options = TRAINERS[kind]
    model, alone = build(), build()
    trainer = made(model, tmp_path)
    assert enable_packing(trainer, verify=False, **options) is trainer
    losses, batches = train_recorded(trainer)
    assert kind.startswith("SFT ") or {batch["input_ids"].shape[1] for batch in batches} == {CAPACITY}
    assert losses == pytest.approx(per_document_losses(alone, batches), abs=1e-4)
    assert differences(model, alone) < 1e-5


def test_without_enable_packing_sft_trainer_trains_gpt_oss_contaminated(tmp_path) -> None:
    """The test above could not fail if it did not hold."""
    model, alone = gpt_oss(), gpt_oss()
    trainer = sft(model, tmp_path, documents(), **PACKED)
    losses, batches = train_recorded(trainer)
    for batch in batches:
        batch["packed_lengths"] = tuple(batch["cu_seq_lens_q"].diff().tolist())
    assert losses != pytest.approx(per_document_losses(alone, batches), abs=1e-3)


def test_sft_trainer_that_builds_the_model_from_a_name_and_applies_peft(tmp_path) -> None:
    llama().save_pretrained(tmp_path / "model")
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    more = {"peft_config": adapter, "model_init_kwargs": {"dtype": "float32"}}
    trainer = sft(str(tmp_path / "model"), tmp_path / "run", documents(), **PACKED, **more)
    alone = peft.get_peft_model(llama(), adapter)
    alone.load_state_dict(trainer.model.state_dict())
    enable_packing(trainer, verify=False)
    losses, batches = train_recorded(trainer)
    assert losses == pytest.approx(per_document_losses(alone, batches), abs=1e-4)
    assert differences(trainer.model, alone) < 1e-5


def sft(model, tmp_path, data, peft_config=None, **options):
    data = data.remove_columns([name for name in data.column_names if name == "comment"])
    tokenizer = tiny_tokenizer()
    args = arguments(trl.SFTConfig, tmp_path, shuffle_dataset=False, **options)
    return trl.SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer, peft_config=peft_config)


def tiny_tokenizer(**options) -> transformers.PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w3"))
    special = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2", "unk_token": "w3"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special | options)


def test_packed_rows_hold_every_document_once_with_its_prompt_masked() -> None:
    data = documents()
    rows = pack_dataset(data, CAPACITY)
    found = {}
    for row in rows:
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) == len(row["labels"]) <= CAPACITY
        cuts = np.cumsum(row["seq_lengths"])[:-1]
        for ids, labels in zip(np.split(row["input_ids"], cuts), np.split(row["labels"], cuts), strict=True):
            found[tuple(ids)] = tuple(labels)
    wanted = {tuple(r["input_ids"]): (-100, *r["labels"][1:]) for r in data}
    assert found == wanted
    assert sorted(rows.features) == ["input_ids", "labels", "seq_lengths"]
    masked = {"completion_mask": [[0, 1, 1, 1]], "assistant_masks": [[1, 1, 0, 1]], "input_ids": [[5, 6, 7, 8]]}
    assert pack_dataset(datasets.Dataset.from_dict(masked), 8)[0]["labels"] == [-100, 6, -100, 8]


def test_bad_input_says_what_and_the_way_out(tmp_path) -> None:
    with pytest.raises(LayoutError, match="the dataset has no input_ids, only text: tokenise it first"):
        pack_dataset(datasets.Dataset.from_dict({"text": ["a"]}), 8)
    with pytest.raises(CapacityError, match="document 0 has 4 tokens and capacity is 3"):
        pack_dataset(datasets.Dataset.from_dict({"input_ids": [[5, 6, 7, 8]]}), 3)
    trainer = sft(llama(), tmp_path, documents(), packing=True, max_length=CAPACITY, bf16=False)
    with pytest.raises(PackingError, match="packs by itself, so capacity=64 has no effect"):
        enable_packing(trainer, capacity=64, verify=False)


class Penalised(torch.nn.Module):
    """Holds a model whose logits it keeps small."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()
        self.config = self.model.config

    def forward(self, input_ids=None, labels=None, **others):
        output = self.model(input_ids=input_ids, labels=labels, **others)
        return {"loss": output.loss + 0.1 * output.logits.pow(2).mean(), "logits": output.logits}


def test_a_model_that_reads_its_logits_trains_by_them(tmp_path):
    def trained(fast):
        trainer = plain(Penalised(), tmp_path, documents())
        enable_packing(trainer, CAPACITY, verify=False, fast=fast).train()
        return trainer

    fast, slow = trained(fast=True), trained(fast=False)
    assert fast.packed_step.parts["loss"].startswith("with logits: a wrapper, a hook or a subclass of the model reads")
    for ours, theirs in zip(fast.model.parameters(), slow.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_what_was_set_since_the_last_call_is_kept(tmp_path):
    trainer = plain(llama(), tmp_path, documents())
    enable_packing(trainer, CAPACITY, verify=False)
    trainer.data_collator = collator = with_boundaries(trl.trainer.sft_trainer.DataCollatorForLanguageModeling(0))
    trainer.train_dataset = pack_dataset(documents(), CAPACITY)
    enable_packing(trainer, verify=False)
    assert trainer.data_collator is collator
