"""The tables "what `patch` accepts" of docs/torch.md: every cell is run, or names the test that holds it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import torch_backend
from packing_core.errors import PackingError
from tests.torch_backend.hf.test_conditions import model_of
from tests.torch_backend.hf.test_multimodal import joined_kinds, on_axes, rope_index, rows_of
from tests.torch_backend.models import collate, documents, error, tiny
from tests.torch_backend.vision_models import image_documents, joined_images, kinds_of, vision_model
from torch_backend.auditing.tiny import tiny_model
from torch_backend.packed_tokens import plain

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/torch.md").read_text().partition("## What `patch` accepts")[2].partition("\n## ")[0]


@dataclass
class Case:
    """A model, a packed batch for it with all its inputs, and what it computes for each document alone."""

    model: Any
    batch: dict[str, Any]
    alone: list[Tensor]


def outputs(model: Any, batch: dict[str, Any]) -> Tensor:
    """Logits or hidden states, [B, S, ...], or [documents, classes]."""
    found = model(**batch)
    return found.logits if "logits" in found else found.last_hidden_state


@torch.no_grad()
def text_case(model: Any, **changes: Callable[[dict[str, Any]], Tensor]) -> Case:
    docs = documents()
    batch = collate(docs)
    batch |= {name: change(batch) for name, change in changes.items()}
    return Case(model, batch, [outputs(model, {"input_ids": d[None]})[0] for d in docs])


def headed(family: str, auto: Any) -> Any:
    config = tiny(family, pad_token_id=0).config
    return tiny_model(config, auto._model_mapping[type(config)]).train()


@torch.no_grad()
def image_case(case: str) -> Case:
    model, rows = vision_model(case), image_documents(case)
    docs = [document for row in rows for document in row]
    alone = [outputs(model, {"input_ids": d.ids[None], **d.images, "mm_token_type_ids": d.types})[0] for d in docs]
    batch = {**rows_of(rows), **joined_images(case, rows)}
    batch["position_ids"] = on_axes(batch, [rope_index(model, doc) for doc in docs])
    return Case(model, batch, alone)


@torch.no_grad()
def both_ways() -> Case:
    model, rows = vision_model("gemma3"), image_documents("gemma3")
    docs = [document for row in rows for document in row]
    alone = [outputs(model, {"input_ids": d.ids[None], **d.images, **kinds_of("gemma3", d)})[0] for d in docs]
    return Case(model, {**rows_of(rows), **joined_images("gemma3", rows), **joined_kinds("gemma3", rows)}, alone)


def family_of(name: str) -> Any:
    config = getattr(transformers, f"{name}Config")()
    config.vocab_size, config.num_hidden_layers = 96, 1
    with torch.device("meta"):
        return transformers.AutoModel.from_config(config)


CASES: dict[str, Callable[[], Case]] = {
    "language model": lambda: text_case(tiny("qwen3")),
    "language model, decoder run per document": lambda: text_case(tiny("falcon_alibi")),
    "language model, rotary frequencies per document": lambda: text_case(model_of("phi3")),
    "vision-language model, text alone": lambda: text_case(vision_model("qwen2_vl")),
    "vision-language model, images on three axes": lambda: image_case("qwen2_vl"),
    "vision-language model, images that attend both ways": both_ways,
    "token classification": lambda: text_case(
        headed("qwen3", transformers.AutoModelForTokenClassification), labels=lambda batch: batch["input_ids"] % 2
    ),
    "no head (`AutoModel`)": lambda: text_case(headed("qwen3", transformers.AutoModel)),
    "sequence classification": lambda: text_case(
        headed("qwen3", transformers.AutoModelForSequenceClassification), labels=lambda batch: torch.arange(8) % 2
    ),
    "encoder": lambda: text_case(headed("bert", transformers.AutoModel)),
    "masked language model": lambda: text_case(
        headed("bert", transformers.AutoModelForMaskedLM), labels=lambda batch: batch["input_ids"]
    ),
    "question answering": lambda: Case(headed("qwen3", transformers.AutoModelForQuestionAnswering), {}, []),
    "encoder-decoder": lambda: Case(family_of("T5"), {}, []),
}


def embedded(case: Case) -> dict[str, Any]:
    kept = {name: value for name, value in case.batch.items() if name != "input_ids"}
    return {**kept, "inputs_embeds": case.model.get_input_embeddings()(plain(case.batch["input_ids"])).detach()}


def on_three_axes(case: Case) -> dict[str, Any]:
    positions = case.batch["position_ids"]
    return {**case.batch, "position_ids": positions if positions.ndim == 3 else positions.expand(3, -1, -1)}


def of_each_document(case: Case) -> dict[str, Any]:
    batch = case.batch
    return {**batch, "position_ids": rows_positions(batch)}


def rows_positions(batch: dict[str, Any]) -> Tensor:
    """[B, S]: 0, 1, 2, ... in every document."""
    numbers = torch.cat([torch.arange(length) for length in batch["packed_lengths"]])
    return numbers.view(batch["input_ids"].shape)


def holed(case: Case) -> dict[str, Any]:
    mask = torch.ones_like(case.batch["input_ids"])
    mask[0, 2] = 0
    return {**case.batch, "attention_mask": mask}


def without(*names: str) -> Callable[[Case], dict[str, Any]]:
    return lambda case: {name: value for name, value in case.batch.items() if name not in names}


INPUTS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "boundaries": without("attention_mask", "position_ids", "labels"),
    "mask of ones": lambda case: {**case.batch, "attention_mask": torch.ones_like(case.batch["input_ids"])},
    "other mask": holed,
    "positions `[B, S]`": of_each_document,
    "positions `[3, B, S]`": on_three_axes,
    "`inputs_embeds`": embedded,
    "`labels`": lambda case: case.batch,
    "cache": lambda case: {**case.batch, "past_key_values": transformers.DynamicCache()},
}


def tables() -> list[list[list[str]]]:
    """The tables of the section: lines of cells."""
    found = re.findall(r"(?:^\|.*\n)+", PAGE, flags=re.MULTILINE)
    return [[[cell.strip() for cell in line.strip("|\n").split("|")] for line in t.splitlines()] for t in found]


HEADER, _, *LINES = tables()[0]
MESSAGES = dict(re.findall(r"^(\d+)\. `(.*)`$", PAGE, flags=re.MULTILINE))
CELLS = [(line[0], column, cell) for line in LINES for column, cell in zip(HEADER[1:], line[1:], strict=True)]


def run(case: Case, column: str) -> Tensor:
    torch_backend.patch(case.model, verify=False)
    return outputs(case.model, INPUTS[column](case))


def test_the_table_has_every_model_and_every_input_and_uses_every_message() -> None:
    assert [line[0] for line in LINES] == list(CASES) and HEADER[1:] == list(INPUTS)
    assert {cell.removeprefix("refused ") for _, _, cell in CELLS if cell != "exact"} - {"-"} == set(MESSAGES)


@pytest.mark.parametrize(("kind", "column", "cell"), CELLS)
def test_a_cell_is_what_happens(kind: str, column: str, cell: str) -> None:
    if cell == "-":
        assert kind in ("no head (`AutoModel`)", "encoder") and column == "`labels`"
        return
    case = CASES[kind]()
    if cell != "exact":
        with pytest.raises(PackingError, match=re.escape(MESSAGES[cell.removeprefix("refused ")])):
            run(case, column)
        return
    found = run(case, column)
    split = found if found.ndim == 2 else found.flatten(0, 1).split(case.batch["packed_lengths"])
    assert case.alone and max(error(x, y) for x, y in zip(split, case.alone, strict=False)) <= 1e-5


def test_every_wrapper_names_the_tests_that_hold_it() -> None:
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    lines = tables()[1][2:]
    assert len(lines) > 12
    for *_, held in lines:
        names = re.findall(r"`(test_\w+)`", held)
        assert names and all(f"def {name}(" in tests for name in names), held
