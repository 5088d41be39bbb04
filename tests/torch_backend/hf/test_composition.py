"""Patched models among the other things that change models: hooks, copies, pickles, generation, sharding."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import sys
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn

import torch_backend
from packing_core.errors import LayoutError, UnsupportedModelError
from tests import processes
from tests.torch_backend.models import alone, assert_same, collate, documents, packed, tiny
from torch_backend.hf.anatomy.layers import find_mixers
from torch_backend.hf.attention import PREFIX
from torch_backend.hf.entry import current_forward
from torch_backend.hf.patch import state_of

ROUTES = ["qwen3", "qwen3_next", "mamba", "bloom", "falcon_alibi"]


def patched(family: str) -> Any:
    return torch_backend.patch(tiny(family), verify=False)


def hooked_layers(model: nn.Module) -> list[nn.Module]:
    """The layers whose forward the patch replaces."""
    state = state_of(model)
    return list(state.anatomy.layers.values()) if state else []


# -- accelerate's hooks and other forwards on an instance ------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "order"),
    [
        *(("qwen3_next", order) for order in ("pahu", "phau", "hpau", "hpua", "phua")),
        *((family, order) for family in ("qwen3", "mamba", "falcon_alibi") for order in ("phau", "hpua")),
    ],
)
def test_patches_and_hooks_come_off_in_any_order(family: str, order: str) -> None:
    """p: patch, a: packed run and unpatch, h: hook, u: unhook."""
    model, docs = tiny(family), documents()
    classes = [type(module) for module in model.modules()]
    truth, plain = alone(model, docs), model.eval()(input_ids=docs[1][None]).logits
    model.train()
    for step in order:
        if step == "p":
            torch_backend.patch(model, verify=False)
        elif step == "h":
            for module in model.modules():
                add_hook_to_module(module, ModelHook())
        elif step == "u":
            remove_hook_from_module(model, recurse=True)
        else:
            assert_same(packed(model, docs), truth, 2e-5)
            choices = str(torch_backend.explain(model))
            assert "somebody set a forward" not in choices
            assert ("linear_attn: row" in choices) == (family == "qwen3_next")
            torch_backend.unpatch(model)
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(model.eval()(input_ids=docs[1][None]).logits, plain)
    torch_backend.patch(model.train(), verify=False)
    assert_same(packed(model, docs), truth, 2e-5)


def test_a_model_spread_by_a_device_map_trains_packed() -> None:
    model, docs = tiny("qwen3"), documents()
    truth = alone(model, docs)
    parts = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    parts |= {f"model.layers.{i}": "cpu" for i in range(len(model.model.layers))}
    dispatch_model(model, parts, main_device="cpu", force_hooks=True)
    torch_backend.patch(model)  # proven on a clone too
    assert_same(packed(model, docs), truth, 2e-5)


def test_the_segments_follow_a_layer_to_its_device() -> None:
    """Accelerate moves every argument of a layer with ``to``; copies on other devices share their record."""
    from torch_backend.hf.forward import DocumentsChoice, PackedForward
    from torch_backend.segments import PackedMetadata

    forward = PackedForward(PackedMetadata.from_lengths((3, 5)), (1, 8))
    assert forward.to("cpu") is forward and forward.to(torch.device("cpu"), non_blocking=True) is forward
    elsewhere = forward.to("meta")
    assert elsewhere.segments.device.type == "meta" and elsewhere.to("cpu") is forward
    layer = nn.Identity()
    elsewhere.record(layer, DocumentsChoice("a test"))
    assert forward.choices == {id(layer): DocumentsChoice("a test")}


def test_an_unknown_forward_on_an_instance_is_named_and_kept_exact(caplog: pytest.LogCaptureFixture) -> None:
    model, docs = tiny("qwen3_next"), documents()
    truth = alone(model, docs)
    mixer = next(iter(find_mixers(model).values()))
    own, calls = mixer.forward, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    mixer.forward = counted
    with caplog.at_level(logging.WARNING):
        torch_backend.patch(model, verify=False)
    assert_same(packed(model, docs), truth, 2e-5)
    assert calls
    assert (
        "runs on batches of documents instead of whole rows, which costs speed: somebody set a forward" in caplog.text
    )
    assert "not row: somebody set a forward on this instance" in str(torch_backend.explain(model))
    torch_backend.unpatch(model)
    assert mixer.forward is counted


def test_explain_names_the_layers_that_keep_their_own_rotation() -> None:
    model = tiny("qwen3")
    layer = model.model.layers[0].self_attn
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **kwargs)
    torch_backend.patch(model, verify=False)
    notes = str(torch_backend.explain(model))
    assert "modeling file's own in layers.0.self_attn: somebody set a forward on this instance" in notes
    assert (
        "the rotary embedding is the modeling file's own in layers.0.self_attn: it does not call apply_rotary"
        in str(torch_backend.explain(patched("gpt2"))).replace("h.0.attn and 1 more", "layers.0.self_attn")
    )


# -- copies and pickles ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("family", ROUTES)
def test_a_copied_or_pickled_model_is_patched_on_its_own(family: str, copied: Any) -> None:
    model, docs = patched(family), documents()
    want = packed(model, docs)
    loaded = copied(model)
    torch_backend.unpatch(model)
    with torch.no_grad():
        next(model.parameters()).zero_()
    assert state_of(loaded).root is loaded
    assert_same(packed(loaded, docs), want, 0.0)
    torch_backend.unpatch(loaded)
    assert state_of(loaded) is None and type(loaded) is type(tiny(family))


@pytest.mark.slow
def test_a_saved_model_loads_in_another_process(tmp_path: Any) -> None:
    model, batch = patched("qwen3_next").eval(), collate(documents())
    with torch.no_grad():
        torch.save((model, batch, model(**batch).logits), tmp_path / "model.pt")
    code = (
        "import torch\n"
        f"model, batch, want = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "assert torch.equal(model(**batch).logits, want)\n"
    )
    result = processes.run([sys.executable, "-c", code])
    assert result.returncode == 0, result.stderr


def test_a_layer_of_a_patched_model_can_be_copied() -> None:
    model = patched("qwen3")
    layer = model.model.layers[0].self_attn
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    assert type(copy.deepcopy(layer)) is type(layer)


# -- what changes after the patch ------------------------------------------------------------------------------------


def test_unpatch_keeps_an_implementation_that_was_set_later() -> None:
    model = patched("qwen3")
    model.set_attn_implementation("eager")
    torch_backend.unpatch(model)
    assert model.config._attn_implementation == "eager"
    assert not any(PREFIX in m.config._attn_implementation for m in model.modules() if hasattr(m, "config"))


def test_a_packed_batch_after_another_implementation_was_set_raises() -> None:
    model = patched("qwen3")
    model.set_attn_implementation("eager")
    docs = documents()
    truth = alone(model, docs)
    with pytest.raises(
        UnsupportedModelError, match=r"was set to 'eager' after patch\(model\).*call patch\(model\) again"
    ):
        model(**collate(docs))
    assert_same(packed(torch_backend.patch(model, verify=False), docs), truth, 2e-5)


def test_an_exception_inside_a_forward_leaves_nothing_behind() -> None:
    model, docs = patched("qwen3"), documents()
    want = packed(model, docs)
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("a fault")))
    with pytest.raises(RuntimeError, match="a fault"):
        model(**collate(docs))
    handle.remove()
    assert current_forward() is None
    model(input_ids=docs[0][None])  # not packed, and must not be taken for the batch before
    assert_same(packed(model, docs), want, 0.0)
    with pytest.raises(LayoutError):
        model(input_ids=docs[0][None], packed_lengths=(1, 2))
    assert current_forward() is None
    assert_same(packed(model, docs), want, 0.0)


# -- generation ------------------------------------------------------------------------------------------------------


def test_continuous_batching_runs_and_packed_training_goes_on_after_it() -> None:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model, docs = tiny("llama").eval(), documents((9, 5))
    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)

    small = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=16)  # its default fills most of the memory

    def run() -> list[list[int]]:
        results = model.generate_batch(
            [d.tolist() for d in docs],
            generation_config=config,
            continuous_batching_config=small,
            progress_bar=False,
        )
        return sorted(list(result.generated_tokens) for result in results.values())

    want = run()
    truth = alone(model.train(), documents())
    torch_backend.patch(model, verify=False)
    packed(model, documents())
    assert run() == want
    assert_same(packed(model.train(), documents()), truth, 2e-5)
    torch_backend.unpatch(model)
    assert model.config._attn_implementation == "sdpa"


# -- sharding --------------------------------------------------------------------------------------------------------


def test_layers_are_known_by_the_names_of_their_base_classes() -> None:
    """FSDP2 renames the class of what it shards."""
    model = tiny("jamba")
    names = set(find_mixers(model))
    for layer in model.model.layers:
        layer.__class__ = type(f"FSDP{type(layer).__name__}", (type(layer),), {})
    assert set(find_mixers(model)) == names
    docs = documents()
    truth = alone(model, docs)
    assert_same(packed(torch_backend.patch(model, verify=False), docs), truth, 2e-5)


@pytest.mark.parametrize("family", ["falcon_alibi", "mamba", "recurrent_gemma"])
def test_what_is_called_per_document_may_not_be_sharded(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched(family)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    model(**collate(documents()))
    for parameter in model.parameters():
        parameter.ds_id = 0  # as DeepSpeed ZeRO-3 marks what it gathers
    with pytest.raises(UnsupportedModelError, match=r"sharded by DeepSpeed ZeRO-3, and .* a different number of times"):
        model(**collate(documents()))


def test_what_runs_on_the_row_may_be_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched("qwen3")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    for parameter in model.parameters():
        parameter.ds_id = 0
    model(**collate(documents()))
