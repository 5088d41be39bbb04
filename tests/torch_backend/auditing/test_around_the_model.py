"""Adapters, prefixes, parallelism and other models around a packed batch: exact, or refused for what they are."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import transformers
from accelerate import ParallelismConfig
from peft import PrefixTuningConfig, PromptTuningConfig, TaskType, get_peft_model

import torch_backend
from packing_core.errors import LayoutError, UnsupportedError, UnsupportedModelError
from tests.torch_backend.models import batch_of, collate, documents, ones, patched, tiny
from torch_backend.hf.patch import state_of
from torch_backend.packed_tokens import plain


def test_a_model_built_from_a_patched_model_s_config_refuses_packed_batches() -> None:
    model, batch = patched(), batch_of()
    sibling = type(model)(copy.deepcopy(model.config))
    sibling(input_ids=plain(batch["input_ids"]))
    with pytest.raises(UnsupportedModelError, match="LlamaAttention was given .* not patched .* 'crosspack_sdpa'"):
        sibling(**plain(batch))  # as a collator of somebody else makes it
    torch_backend.patch(sibling, verify=False)(**batch)


@pytest.mark.parametrize("keys", [("packed_lengths",), ("cu_seq_lens_q", "max_length_q")])
def test_prompt_tuning_is_refused_for_what_it_is(keys: tuple[str, ...]) -> None:
    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=8)
    model = get_peft_model(patched(), config)
    batch = collate(documents(), capacity=None)
    given = {key: batch[key] for key in ("input_ids", "labels", *keys)}
    with pytest.raises(UnsupportedModelError, match="a packed batch reached a model that is not patched"):
        model(**given)
    with pytest.raises(
        LayoutError, match="the segments hold 125 tokens and inputs_embeds 133: if prompt tuning .* use LoRA"
    ):
        model(**plain(given))


def test_prefix_tuning_is_refused_for_what_it_is() -> None:
    config = PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=8)
    model = get_peft_model(patched(), config)
    with pytest.raises(UnsupportedModelError, match="came with past_key_values: prefix tuning and .*; use LoRA"):
        model(**batch_of(attention_mask=ones()))


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("LoraConfig", {"alora_invocation_tokens": [5, 6]}, r"\(activated LoRA\) starts at the last"),
        ("LilyConfig", {}, r"\(LILY\) mixes its experts by the mean over all tokens"),
    ],
    ids=["aLoRA", "LILY"],
)
def test_adapters_that_read_the_whole_row_are_refused(kind: str, options: dict[str, Any], reason: str) -> None:
    if not hasattr(peft, kind):
        pytest.skip(f"this version of PEFT has no {kind}")
    config = getattr(peft, kind)(target_modules=["q_proj"], **options)
    refused = f"LlamaForCausalLM cannot be trained packed, because adapter 'default' {reason}"
    after = get_peft_model(patched(), copy.deepcopy(config))
    with pytest.raises(UnsupportedModelError, match=refused):
        after(**batch_of())
    after(input_ids=documents()[0][None])
    with pytest.raises(UnsupportedModelError, match=refused):
        torch_backend.patch(get_peft_model(tiny("llama"), config), verify=False)


def test_rows_that_context_parallelism_has_cut_are_refused_for_what_they_are() -> None:
    """As accelerate's context parallelism leaves them: the tensors of tokens are cut, the boundaries are not."""
    batch = batch_of(shift_labels=collate(documents())["labels"].roll(-1, 1))
    cut = {key: batch[key][:, 32:] for key in ("input_ids", "labels", "shift_labels", "position_ids")}
    batch.pop("seq_idx")
    with pytest.raises(LayoutError, match="input_ids 64: if context or sequence parallelism cut the rows into 2 parts"):
        patched()(**{**batch, **cut})


def test_a_trainer_that_cuts_rows_by_sequence_parallelism_is_refused_before_it_trains(tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = transformers.Trainer(tiny("llama"), arguments, collate)
    trainer.accelerator = SimpleNamespace(parallelism_config=ParallelismConfig(sp_size=2))
    with pytest.raises(
        UnsupportedError, match=r"sequence parallelism \(sp_size=2\) .* or context parallelism, cp_size=2"
    ):
        torch_backend.enable_packing(trainer)
    assert state_of(trainer.model) is None


@pytest.mark.parametrize("function", ["patch", "unpatch", "unpad", "audit"])
def test_a_flax_model_is_sent_to_the_functions_for_jax(function: str) -> None:
    class Model:
        __module__ = "flax.nnx.module"  # where nnx.Module, the base of every flax model, says that it is from

    Mine = type("Mine", (Model,), {"__module__": "my_models"})
    with pytest.raises(UnsupportedModelError, match=r"got the flax model Mine: .* judged by jax_backend.audit"):
        getattr(torch_backend, function)(Mine())
    with pytest.raises(
        UnsupportedModelError, match=r"^expected a transformers model, got a str \('my-model'\): .*from_pre"
    ):
        getattr(torch_backend, function)("my-model")
