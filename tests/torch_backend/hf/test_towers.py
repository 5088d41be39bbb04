"""Vision towers in packed calls: all images of a step in one call for each layer, and few reads of the device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers.models.pixtral import modeling_pixtral

import torch_backend
from tests.torch_backend.hf.test_multimodal import joined_kinds, rows_of
from tests.torch_backend.vision_models import IMAGE, image_documents, joined_images, vision_model
from torch_backend.hf import attention

slow = pytest.mark.slow


@pytest.mark.parametrize("case", ["mistral3", "pixtral", "lighton_ocr"])
def test_pixtral_attends_to_images_of_any_size_in_one_call_for_each_layer_without_a_mask(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = vision_model(case), image_documents(case)
    batch = {**rows_of(rows), **joined_images(case, rows)}
    tower = next(x for x in model.base_model.children() if x.config.model_type == "pixtral")
    seen: list[Any] = []
    tower.register_forward_hook(lambda module, args, kwargs, output: seen.append(output), with_kwargs=True)
    document = rows[1][1]
    sizes = torch.tensor([[16, 16], [8, 16], [16, 8]])
    tokens = [int(x) for x in sizes.prod(1) // 16 // (1 if case == "pixtral" else 4)]
    ids = torch.cat([torch.tensor([5, *[IMAGE] * n, 6]) for n in tokens])[None]
    unequal = {"input_ids": ids, "pixel_values": document.images["pixel_values"], "image_sizes": sizes}
    want = model(**unequal).logits
    torch_backend.patch(model, verify=False)
    calls, masks, own = [], [], attention._of_tower
    mask = modeling_pixtral.generate_block_attention_mask
    monkeypatch.setattr(modeling_pixtral, "generate_block_attention_mask", lambda *x: masks.append(x) or mask(*x))
    monkeypatch.setattr(attention, "_of_tower", lambda *given, **named: calls.append(given[3]) or own(*given, **named))
    model(**batch)
    assert [call.lengths for call in calls] == [(16,) * len(batch["image_sizes"])] * 2 and not masks  # of two layers
    calls.clear()
    packed = {"position_ids": torch.arange(ids.shape[1])[None], "packed_lengths": (ids.shape[1],)}
    torch.testing.assert_close(model(**unequal, **packed).logits, want, rtol=1e-5, atol=1e-5)
    assert [call.lengths for call in calls] == [(16, 8, 8)] * 2 and not masks
    states = [x.hidden_states for x in (seen[0], seen[-1])]  # which one of the families reads
    assert states == [None, None] or [len(x) for x in states] == [3, 3]
    model(**unequal)
    assert len(calls) == 2 and len(masks) == 1 and tower.config is model.config.vision_config


@pytest.mark.parametrize(
    "case",
    [
        *("internvl", "idefics3", "gemma3", "llava_next"),
        *(pytest.param(name, marks=slow) for name in ("llava", "llava_onevision", "smolvlm", "idefics2", "lfm2_vl")),
        *(pytest.param(name, marks=slow) for name in ("gemma4", "paligemma", "aya_vision", "deepseek_vl", "vipllava")),
    ],
)
def test_towers_of_tiles_of_one_size_run_them_as_a_batch(case: str) -> None:
    model, rows = vision_model(case), image_documents(case)
    torch_backend.patch(model, verify=False)
    batch = {**rows_of(rows), **joined_images(case, rows), **joined_kinds(case, rows)}
    calls: Counter[str] = Counter()
    tiles = set()

    def count(name: str) -> Any:
        def hook(layer: Any, args: Any, kwargs: Any, output: Any) -> None:
            calls[name] += 1
            tiles.add(len(args[0] if args else kwargs["hidden_states"]))

        return hook

    for name, module in model.named_modules():
        if "vision" in name and type(module).__name__.endswith("Attention"):
            module.register_forward_hook(count(name), with_kwargs=True)
    model(**batch)
    shown = sum(len(document.images.get("image_sizes", ())) for row in rows for document in row)
    images = {"llava_next": 2 * shown, "llava_onevision": 2 * shown}.get(case, 6)
    assert len(calls) == 2 and set(calls.values()) == {1} and tiles == {images}


@pytest.mark.parametrize("case", ["mistral3", "llava_next"])
def test_sizes_of_images_reach_the_model_on_the_host(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The models read them image by image; a tensor that is not on the host would be waited for each time."""
    model, rows = vision_model(case), image_documents(case)
    torch_backend.patch(model, verify=False)
    read = []
    own = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x, *given: read.append(x.shape) or own(x, *given))
    batch = {**rows_of(rows), **joined_images(case, rows)}
    model(**batch)
    assert read.count(batch["image_sizes"].shape) == 1
