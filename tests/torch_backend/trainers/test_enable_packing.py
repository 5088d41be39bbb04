"""enable_packing at the call: what it refuses, with the reason, and which collator a trainer has afterwards."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from packing_core import PackedDataset
from packing_core.errors import LayoutError, PackingError, UnsupportedError, UnsupportedModelError
from tests.torch_backend.models import tiny
from tests.torch_backend.trainers.test_trainer import (
    CAPACITY,
    arguments,
    datasets,
    documents,
    llama,
    sft,
    tiny_tokenizer,
    trl,
)
from torch_backend import PackedCollator, audit, pack_dataset, with_boundaries
from torch_backend.collate import BoundaryCollator
from torch_backend.hf.inputs.trl_trainers import has_tree_rows, kind_of
from torch_backend.trainers.enable_packing import enable_packing

PROMPTS = {"input_ids": [[5, 6, 7, 8], [9, 10, 11]], "labels": [[-100, -100, 7, 8], [-100, 10, 11]]}


def plain(tmp_path, data, kind=transformers.Trainer, **options):
    data = datasets.Dataset.from_dict(data) if isinstance(data, dict) else data
    return kind(llama(), arguments(transformers.TrainingArguments, tmp_path), train_dataset=data, **options)


def enabled(trainer, **options):
    return enable_packing(trainer, verify=False, **options)


def padded(features: list[dict[str, Any]], masked: int) -> dict[str, torch.Tensor]:
    """Pads as most collators do, and takes the first ``masked`` tokens for a prompt."""
    longest = max(len(f["input_ids"]) for f in features)
    batch: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for ids in (list(f["input_ids"]) for f in features):
        padding = longest - len(ids)
        batch["input_ids"].append(ids + [0] * padding)
        batch["labels"].append([-100] * masked + ids[masked:] + [-100] * padding)
        batch["attention_mask"].append([1] * len(ids) + [0] * padding)
    return {name: torch.tensor(x) for name, x in batch.items()}


def masks_two(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return padded(features, 2)


def trains_everything(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return padded(features, 0)


# What the old collator trains and what the new one would.


IDS = PROMPTS["input_ids"]
ENDS = transformers.DataCollatorForLanguageModeling(tiny_tokenizer(pad_token="w2"), mlm=False)  # pads with end of text
ANSWERS = {"input_ids": IDS, "labels": [[-100, -100, 7, 8], [-100, -100, 11]]}


@pytest.mark.parametrize(
    ("data", "collator", "evaluation", "message"),
    [
        (
            {"input_ids": IDS},
            masks_two,
            None,
            "masks_two trains other tokens than packing would: token 1 of training example 0 has the label -100 there "
            "and 6 when packed.*add a labels column.*PackedCollator.*with_boundaries",
        ),
        (PROMPTS, trains_everything, None, "1 of training example 0 has the label 6 there and -100 when packed"),
        (
            {"input_ids": IDS, "completion_mask": [[0, 0, 1, 1], [0, 1, 1]]},
            trains_everything,
            None,
            "1 of training example 0 has the label 6 there and -100 when packed",
        ),
        (
            {"input_ids": [[5, 6], [5, 6, 7, 8]], "labels": [[-100, -100], [5, 6, 7, 8]]},
            masks_two,
            None,
            "1 of training example 1 has the label -100 there and 6 when packed",
        ),
        ({"input_ids": [[5, 6, 2]]}, ENDS, None, "2 of training example 0 has the label -100 there and 2 when packed"),
        (ANSWERS, masks_two, [[5, 6, 7]], "evaluation example 0 has the label -100 there and 6 when packed"),
        ({"input_ids": [[5, 6, 7]], "label": [1]}, None, None, "gives labels .* one label for each token"),
    ],
)
def test_a_collator_is_not_replaced_by_one_that_trains_other_tokens(
    tmp_path, data, collator, evaluation, message
) -> None:
    evaluation = evaluation and datasets.Dataset.from_dict({"input_ids": evaluation})
    trainer = plain(tmp_path, data, data_collator=collator, eval_dataset=evaluation)
    before = trainer.data_collator
    with pytest.raises(PackingError, match=message):
        enabled(trainer)
    assert trainer.data_collator is before
    assert trainer.model.config._attn_implementation == "sdpa", "a refused trainer keeps the model that it had"


def test_a_collator_that_trains_what_the_columns_say_is_replaced(tmp_path) -> None:
    ends = {"input_ids": [[5, 6, 2]], "labels": [[5, 6, -100]]}
    counted = {"position_ids": [[0, 1, 2]] * 2, "input_ids": [[5, 6, 7], [8, 9, 10]]}  # which is no packing
    for data, collator in ((ANSWERS, masks_two), (ends, ENDS), (counted | {"labels": counted["input_ids"]}, None)):
        trainer = enabled(plain(tmp_path, data, data_collator=collator), capacity=6)
        assert isinstance(trainer.data_collator, PackedCollator)
    assert next(iter(trainer.get_train_dataloader()))["packed_lengths"] == (3, 3)
    trainer = enabled(sft(llama(), tmp_path, documents(), max_length=CAPACITY, bf16=False), capacity=CAPACITY)
    assert isinstance(trainer.data_collator, PackedCollator)
    trainer = enabled(plain(tmp_path, {"input_ids": [[5, 6, 7]]}))  # without labels every token is trained
    assert trainer.data_collator([{"input_ids": [5, 6, 7]}])["labels"].tolist() == [[-100, 6, 7]]
    for rows in (pack_dataset(documents(), CAPACITY), PackedDataset(list(documents()["input_ids"]), CAPACITY)):
        trainer = enabled(plain(tmp_path, rows))
        assert isinstance(trainer.data_collator, PackedCollator)
        assert len(next(iter(trainer.get_train_dataloader()))["packed_lengths"]) > 2


def test_a_collator_that_changes_tokens_is_not_replaced(tmp_path) -> None:
    tokenizer = tiny_tokenizer(mask_token="w4")
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=True, mlm_probability=1.0)
    data = {"input_ids": [list(range(5, 25))]}
    with pytest.raises(PackingError, match="DataCollatorForLanguageModeling changes the tokens of training example 0"):
        enabled(plain(tmp_path, data, data_collator=collator))

    def shortened(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return trains_everything([{"input_ids": f["input_ids"][:3]} for f in features])

    with pytest.raises(PackingError, match="shortened changes the tokens of training example 0"):
        enabled(plain(tmp_path, data, data_collator=shortened))


def test_padding_is_not_trained_and_labels_that_train_it_are_said_to(tmp_path) -> None:
    """Labels copied from padded input_ids: the default collator trains the padding, and packing cuts it off."""
    data = {"input_ids": [[5, 6, 0], [7, 0, 0]], "attention_mask": [[1, 1, 0], [1, 0, 0]]}
    with pytest.warns(UserWarning, match="labels are 0 where attention_mask is 0"):
        trainer = enabled(plain(tmp_path, {**data, "labels": data["input_ids"]}))
    batch = trainer.data_collator([dict(zip(data, values, strict=True)) for values in zip(*data.values(), strict=True)])
    assert batch["input_ids"].tolist() == [[5, 6, 7]] and batch["labels"].tolist() == [[-100, 6, -100]]


# Collators that stay.


@pytest.mark.parametrize("collator", [PackedCollator(capacity=8, bucket=4), with_boundaries(trains_everything)])
def test_our_own_collators_stay_as_they_are(tmp_path, collator) -> None:
    trainer = enabled(plain(tmp_path, PROMPTS, data_collator=collator))
    assert trainer.data_collator is collator
    assert enabled(trainer).data_collator is collator


@pytest.mark.parametrize("options", [{}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True}])
def test_a_collator_that_packs_is_wrapped(tmp_path, options) -> None:
    trainer = enabled(plain(tmp_path, PROMPTS, data_collator=transformers.DataCollatorWithFlattening(**options)))
    assert isinstance(trainer.data_collator, BoundaryCollator)
    batch = next(iter(trainer.get_train_dataloader()))
    assert sorted(batch["packed_lengths"]) == [3, 4]


def test_a_collator_that_loses_boundaries_is_refused_at_the_call(tmp_path) -> None:
    def joined(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = torch.cat([torch.tensor(f["input_ids"]) for f in features])[None]
        return {"input_ids": ids, "labels": ids}

    def counted(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = joined(features)
        return {**batch, "position_ids": torch.arange(batch["input_ids"].numel())[None]}

    with pytest.raises(LayoutError, match="marks no boundaries"):
        enabled(plain(tmp_path, PROMPTS, data_collator=joined))
    with pytest.raises(LayoutError, match="counted puts 2 documents into rows and marks 1"):
        enabled(plain(tmp_path, PROMPTS, data_collator=counted))


# Trainers.


SERVED = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer", "GRPOTrainer", "RLOOTrainer", "GMPOTrainer")
SERVED += ("GKDTrainer", "GOLDTrainer", "DistillationTrainer")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("CPOTrainer", "compares answers with each other"),
        ("PRMTrainer", "gives each example one score"),
        ("A2POTrainer", "generates completions and reads all logits of padded calls"),
        ("SDFTTrainer", "generates completions and runs its teacher on other prompts"),
        ("ServerDistillationTrainer", "gets a few of its teacher's log-probabilities"),
        ("IWOPDTrainer", "weighs sampled tokens by those before them"),
        ("MiniLLMTrainer", "compares each example with a teacher"),
    ],
)
def test_trainers_whose_loss_is_per_example_are_refused_with_the_reason(name: str, reason: str) -> None:
    """Also one that derives from a trainer which packing serves, because it calls models in ways of its own."""
    bases = (trl.GRPOTrainer if name == "A2POTrainer" else transformers.Trainer,)
    unbuilt = object.__new__(type(name, bases, {"__module__": "trl.experimental.new"}))
    with pytest.raises(
        UnsupportedError, match=rf"{name} {reason}.*documents of a row.*serves transformers.Trainer and TRL's"
    ):
        enabled(unbuilt)


def classes_of_trl() -> dict[str, tuple[str, ...]]:
    """Trainer -> its bases, of every trainer in the installed TRL; importing them all would need their own packages."""
    found = {}
    for file in Path(trl.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Trainer") and not node.name.startswith("_"):
                found[node.name] = tuple(base.id for base in node.bases if isinstance(base, ast.Name))
    return found


def test_every_trainer_of_trl_is_served_or_refused_by_name_and_the_page_says_which() -> None:
    found = classes_of_trl()
    assert len(found) > 15 and found["GMPOTrainer"] == ("GRPOTrainer",), sorted(found)
    page = (Path(__file__).parents[3] / "docs" / "trainers.md").read_text()
    table = page.partition("## Preferences, rewards and policies")[2].partition("```python")[0]
    served = {line.partition("|")[2].partition("|")[0] for line in table.splitlines() if "refused" not in line}
    for name, bases in found.items():
        kind = getattr(trl, bases[0]) if bases and bases[0] in SERVED else transformers.Trainer
        trainer = object.__new__(type(name, (kind,), {"__module__": "trl.experimental.new"}))
        assert f"`{name}`" in table or name == "SFTTrainer", f"{name} is not in the table of docs/trainers.md"
        if name == "AsyncGRPOTrainer":  # see test_tree_rows
            assert has_tree_rows(trainer)
        elif name in SERVED:
            assert kind_of(trainer) is not None or name == "SFTTrainer"
        else:
            assert not any(f"`{name}`" in cell for cell in served), name
            with pytest.raises(UnsupportedError, match=f"^{name} (compares|gives|generates|gets|packs|weighs) "):
                enabled(trainer)


def test_a_refused_trainer_is_known_by_the_names_of_its_bases() -> None:
    """As in libraries that derive from TRL's classes, or copy them; TRL is not imported for it."""
    copied = type("Mine", (type("ORPOTrainer", (transformers.Trainer,), {}),), {})
    with pytest.raises(UnsupportedError, match="Mine compares answers with each other"):
        enabled(object.__new__(copied))
    unknown = type("NewTrainer", (transformers.Trainer,), {"__module__": "trl.experimental.new"})
    with pytest.raises(UnsupportedError, match="NewTrainer is a trainer of TRL that computes its loss per example"):
        enabled(object.__new__(unknown))


@pytest.mark.parametrize("options", [{"packing": True}, {"eval_packing": True}])
def test_rows_of_cut_documents_are_refused_with_the_way_out(tmp_path, options) -> None:
    data = documents()
    trainer = sft(llama(), tmp_path, data, max_length=CAPACITY, packing_strategy="wrapped", bf16=False, **options)
    message = r'packing_strategy="wrapped" cuts documents anywhere.*pass packing_strategy="bfd_split" or "bfd"'
    with pytest.raises(UnsupportedError, match=message):
        enabled(trainer)
    if trainer.args.packing:
        with pytest.raises(UnsupportedError, match=message):
            audit(trainer)


def test_a_trainer_that_only_evaluates_is_served(tmp_path) -> None:
    data = documents(5)
    model = llama()
    trainer = transformers.Trainer(
        model, arguments(transformers.TrainingArguments, tmp_path), eval_dataset={"held out": data}
    )
    enabled(trainer, capacity=CAPACITY)
    rows = data[:]
    found = trainer.evaluate(data)["eval_loss"]
    with torch.no_grad():
        losses = [
            model(input_ids=torch.tensor([ids]), labels=torch.tensor([[-100, *labels[1:]]])).loss.item()
            * sum(label != -100 for label in labels[1:])
            for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True)
        ]
    targets = sum(label != -100 for labels in rows["labels"] for label in labels[1:])
    assert found == pytest.approx(sum(losses) / targets, abs=1e-5)


def test_what_is_no_trainer_or_has_no_data_says_what_is_missing(tmp_path) -> None:
    with pytest.raises(PackingError, match="object is not a transformers.Trainer: pass one that is built"):
        enabled(object())
    trainer = plain(tmp_path, None)
    with pytest.raises(PackingError, match="Trainer has neither a train_dataset nor an eval_dataset"):
        enabled(trainer)
    trainer.data_collator = PackedCollator()
    assert enabled(trainer) is trainer


@pytest.mark.parametrize("collator", [None, transformers.DataCollatorWithFlattening()])
def test_data_that_are_not_tokenised_say_so(tmp_path, collator) -> None:
    trainer = plain(tmp_path, {"text": ["some words"]}, data_collator=collator)
    with pytest.raises(LayoutError, match="the training data have no input_ids, only text: tokenise them first"):
        enabled(trainer)


def test_a_model_that_deepspeed_cannot_split_is_refused(tmp_path) -> None:
    def enable(family: str) -> None:
        given = transformers.TrainingArguments(str(tmp_path), report_to=[])
        data = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}]
        trainer = transformers.Trainer(tiny(family), given, train_dataset=data)
        settings = {"tensor_parallel.autotp_size": 2}
        trainer.args.hf_deepspeed_config = SimpleNamespace(get_value=settings.get)
        enable_packing(trainer, capacity=8, verify=False)

    with pytest.raises(UnsupportedModelError, match="tensor parallelism cannot split bloom, .* autotp_size=2, and use"):
        enable("bloom")
    enable("qwen3")


@pytest.mark.parametrize("place", [0, 2, 3])
def test_an_empty_document_is_named(tmp_path, place) -> None:
    ids = [[5, 6, 7], [8, 9], [4, 5], [6, 7]]
    ids[place] = []
    message = rf"training example {place} is empty: leave empty documents out"
    for collator in (transformers.DataCollatorForLanguageModeling(tiny_tokenizer(), mlm=False), trains_everything):
        with pytest.raises(PackingError, match=message):
            enabled(plain(tmp_path, {"input_ids": ids}, data_collator=collator), capacity=CAPACITY)
    with pytest.raises(PackingError, match="document 0 is empty"):
        PackedCollator()([{"input_ids": []}])
    with pytest.raises(PackingError, match="document 0 is empty"):
        pack_dataset(datasets.Dataset.from_dict({"input_ids": [[]]}), CAPACITY)


class AnyKeywords(torch.nn.Module):
    """Takes what its model takes, by no name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)


@pytest.mark.parametrize(
    ("ids", "model", "collator", "message"),
    [
        ([[5, 6]], AnyKeywords, None, "removes input_ids .* forward of AnyKeywords .* remove_unused_columns=F"),
        ([[5, 6]], llama, lambda _: {"x": torch.zeros(2)}, r"<lambda> returned x\): let it return token ids"),
        (["a b"], llama, transformers.default_data_collator, "no input_ids, only text under that name: tokenise them"),
    ],
)
def test_a_batch_without_input_ids_is_explained_by_what_took_them(tmp_path, ids, model, collator, message) -> None:
    args = arguments(transformers.TrainingArguments, tmp_path)
    data = datasets.Dataset.from_dict({"input_ids": ids})
    with pytest.raises(LayoutError, match=message):
        enabled(transformers.Trainer(model(), args, train_dataset=data, data_collator=collator), capacity=CAPACITY)
