"""enable_packing with images in TRL's DPO, KTO, GRPO and RLOO trainers: updates are those of every document alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from packing_core.errors import LayoutError, UnsupportedError, UnsupportedModelError
from tests.torch_backend.preference import arguments, assert_same_training, divide, packed, text, trained
from tests.torch_backend.processors import picture, tiny_processor
from tests.torch_backend.scored_trainers import LORA, datasets, peft, rewards, same_completions, trl
from tests.torch_backend.vision_models import IMAGE, vision_model
from torch_backend import audit
from torch_backend.auditing.trainer_batches import images_of_rows
from torch_backend.hf.anatomy.families import EXACT_KEYS
from torch_backend.hf.inputs import padded_images
from torch_backend.hf.inputs.padded_images import DocumentPositions
from torch_backend.trainers.enable_packing import enable_packing
from torch_backend.trainers.port import PackingRequest
from torch_backend.trainers.preference import RewardPort, ScoredPort

slow = pytest.mark.slow
FAMILIES = ["qwen2_5_vl", *(pytest.param(name, marks=slow) for name in ("qwen3_vl", "llava", "idefics3", "gemma3"))]
SHOWN = (1, 0, 2, 1, 1, 3, 0, 1)  # images of the prompts
TYPES = ("mm_token_type_ids", "token_type_ids")
GENERATION = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 20, "beta": 0.1}


def say(role: str, words: str) -> list[dict[str, str]]:
    return [{"role": role, "content": words}]


def prompts(rng: np.random.Generator, least: int = 0) -> list[dict[str, Any]]:
    """Prompts with images; policies of TRL 1.16 take no batch of which some prompts have none."""
    seeds = iter(range(100))
    return [
        {"prompt": say("user", text(rng, 2, 10)), "images": [picture(next(seeds)) for _ in range(shown)]}
        for shown in np.maximum(SHOWN, least)
    ]


def model_and_processor(family: str, seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = vision_model(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * seed)
    model.config.pad_token_id = model.generation_config.pad_token_id = 0
    return model, tiny_processor(family)


def preferences(kind: str, family: str, path: Any, **options: Any) -> Any:
    """A trainer of DPO or KTO whose reference is another model than the one that is trained."""
    rng = np.random.default_rng(0)

    def answers(number: int) -> dict[str, Any]:
        names = ("chosen", "rejected") if kind == "DPO" else ("completion",)
        said = {name: say("assistant", text(rng, 2, 20)) for name in names}
        return said if kind == "DPO" else {**said, "label": bool(number % 2)}

    rows = [{**row, **answers(number)} for number, row in enumerate(prompts(rng))]
    model, processor = model_and_processor(family)
    return getattr(trl, f"{kind}Trainer")(
        model,
        model_and_processor(family, seed=1)[0],
        args=arguments(getattr(trl, f"{kind}Config"), path, per_device_train_batch_size=4, **options),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=processor,
    )


dpo, kto = partial(preferences, "DPO"), partial(preferences, "KTO")


def policy(name: str, family: str, path: Any, **options: Any) -> Any:
    """A trainer of completions of 2 to 20 words, whose reference is the model without its adapter."""
    model, processor = model_and_processor(family)
    processor.tokenizer.padding_side = "left"
    found = getattr(trl, f"{name}Trainer")(
        model,
        rewards,
        args=arguments(getattr(trl, f"{name}Config"), path, **GENERATION, **options),
        train_dataset=datasets.Dataset.from_list(prompts(np.random.default_rng(0), 1)),
        processing_class=processor,
        peft_config=peft.LoraConfig(**LORA),
    )
    same_completions(found.model, of_a_prompt=2, words=70)
    return found


def images_of(family: str) -> Callable[[Tensor, Tensor, dict[str, Any]], list[dict[str, Any]]]:
    """The images and the kinds of tokens of each row: every run of image tokens is an image."""

    def more_of(ids: Tensor, mask: Tensor, kwargs: dict[str, Any]) -> list[dict[str, Any]]:
        plain = {k: x for k, x in kwargs.items() if not isinstance(x, Tensor)}
        found, start, patch_start = [], 0, 0
        for row, (of_row, real) in enumerate(zip(ids, mask, strict=True)):
            shown = (of_row == IMAGE).int()
            count = int(((shown[1:] - shown[:-1]) == 1).sum() + shown[0])
            alone = {name: kwargs[name][row, real][None] for name in TYPES if name in kwargs}
            if count and "image_grid_thw" in kwargs:
                grid = kwargs["image_grid_thw"][start : start + count]
                patches = int(grid.prod(-1).sum())
                alone |= {"image_grid_thw": grid}
                alone |= {"pixel_values": kwargs["pixel_values"][patch_start : patch_start + patches]}
                patch_start += patches
            elif count and family == "idefics3":
                names = ("pixel_values", "pixel_attention_mask")
                alone |= {name: kwargs[name][row, :count][None] for name in names if name in kwargs}
            elif count:
                alone |= {"pixel_values": kwargs["pixel_values"][start : start + count]}
            start += count
            found.append({**plain, **alone})
        return found

    return more_of


def assert_packed_is_alone(made: Callable[[], Any], family: str) -> None:
    want = trained(divide(made(), images_of(family)))
    tower = [name for name, x in want[0].items() if "visi" in name.replace("visual", "vision") and bool(x.any())]
    assert tower, "no weight of the tower has a gradient"
    assert_same_training(packed(made()), want)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_of_dpo_is_that_of_each_document_alone(family: str, tmp_path: Any) -> None:
    assert_packed_is_alone(lambda: dpo(family, tmp_path), family)


@slow
@pytest.mark.parametrize("family", ["qwen3_vl", "idefics3"])
def test_an_update_of_kto_is_that_of_each_document_alone(family: str, tmp_path: Any) -> None:
    assert_packed_is_alone(lambda: kto(family, tmp_path), family)


@slow
@pytest.mark.parametrize(("name", "family"), [("GRPO", "qwen2_5_vl"), ("RLOO", "llava")])
def test_an_update_of_a_policy_is_that_of_each_document_alone(name: str, family: str, tmp_path: Any) -> None:
    assert_packed_is_alone(lambda: policy(name, family, tmp_path), family)


@slow
@pytest.mark.parametrize(
    ("made", "family"),
    [(lambda family, path: policy("GRPO", family, path), "llava"), (dpo, "qwen2_5_vl"), (kto, "idefics3")],
)
def test_the_audit_of_a_trainer_with_images_is_exact(made: Any, family: str, tmp_path: Any) -> None:
    trainer = made(family, tmp_path)
    enable_packing(trainer, verify=False)
    report = audit(trainer)
    assert report.verdict == "exact" and report.rows == 1, report


def test_policy_and_reference_number_each_document_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    trainer, calls = enable_packing(dpo("qwen2_5_vl", tmp_path, max_steps=1), verify=False), []
    kind = type(trainer.model.model)
    own = kind.get_rope_index
    monkeypatch.setattr(
        kind, "get_rope_index", lambda *given, **named: calls.append(len(given[1])) or own(*given, **named)
    )
    padded_images._known.clear()
    trainer.train()
    assert calls == [1] * 16  # two answers to each of eight prompts, by the model and its reference


def test_images_that_cannot_be_told_apart_are_refused() -> None:
    model = vision_model("qwen2_5_vl")
    ids = torch.tensor([[5, *[IMAGE] * 8, 6]])
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.zeros(32, 96)}
    with pytest.raises(LayoutError, match="there are 2 images in 1 runs of image tokens: put a token between images"):
        DocumentPositions(model).of_rows({**call, "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)})
    call = {"input_ids": torch.tensor([[IMAGE] * 3, [IMAGE] * 2 + [5]]), "pixel_values": torch.zeros(2, 3, 16, 16)}
    with pytest.raises(UnsupportedError, match="cannot tell which images of LlavaForConditionalGeneration belong to"):
        images_of_rows(vision_model("llava"), call)


def test_trainers_and_families_that_cannot_train_on_images_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = object.__new__(trl.RewardTrainer)
    with pytest.raises(
        UnsupportedError, match=f"RewardTrainer of TRL {version('trl')} reads no images and would score"
    ):
        RewardPort(reward, PackingRequest({})).refuse_images()
    pairs = object.__new__(trl.DPOTrainer)
    pairs.model = vision_model("paligemma")
    with pytest.raises(UnsupportedError, match="DPOTrainer does not mark where a prompt ends, and PaliGemmaForCondit"):
        ScoredPort(pairs, PackingRequest({})).refuse_images()
    monkeypatch.delitem(EXACT_KEYS, "gemma3")
    pairs.model = vision_model("gemma3")
    with pytest.raises(UnsupportedModelError, match="Gemma3ForConditionalGeneration is not known to be exact with im"):
        ScoredPort(pairs, PackingRequest({})).refuse_images()
