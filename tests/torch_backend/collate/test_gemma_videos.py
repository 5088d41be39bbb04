"""Videos of Gemma 4 in packed rows, and Gemma 3n, which takes text alone."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.gemma3n import modeling_gemma3n
from transformers.models.gemma4.modeling_gemma4 import Gemma4Model

import torch_backend
from packing_core.errors import UnsupportedModelError
from tests.torch_backend.hf.test_multimodal import assert_same, each_alone
from tests.torch_backend.models import collate, documents, packed
from tests.torch_backend.vision_models import VIDEO, gemma4_videos, image_documents, kinds_of, vision_model
from torch_backend.collate.vision import VisionReader


@pytest.mark.skipif(
    "num_frames_per_video" not in inspect.signature(Gemma4Model.forward).parameters,
    reason="this release of transformers stacks the frames of videos in another shape",
)
def test_videos_of_gemma4_are_those_of_each_document_alone() -> None:
    model, docs = vision_model("gemma4"), gemma4_videos()
    docs.append(image_documents("gemma4")[0][0])
    truth = each_alone(model, docs, mm_token_type_ids=[doc.types.long() for doc in docs])
    torch_backend.patch(model, verify=False)
    batch = collate([doc.ids for doc in docs], capacity=sum(len(doc.ids) for doc in docs))
    keys = dict.fromkeys(key for doc in docs for key in doc.images)
    batch |= {key: torch.cat([doc.images[key] for doc in docs if key in doc.images]) for key in keys}
    kinds = torch.zeros_like(batch["input_ids"])
    kinds[:, : sum(len(doc.ids) for doc in docs)] = torch.cat([doc.types for doc in docs], 1)
    assert_same(packed(model, [doc.ids for doc in docs], batch | {"mm_token_type_ids": kinds}), truth)


def test_the_reader_takes_processed_videos_of_gemma4() -> None:
    model, docs = vision_model("gemma4"), gemma4_videos()
    reader = VisionReader(model)
    examples = [{"input_ids": doc.ids, **doc.images, **kinds_of("gemma4", doc)} for doc in docs]
    read = [reader.read(example, "an example") for example in examples]
    assert [set(document.images) for document in read] == [set(doc.images) for doc in docs]
    shown = docs[0].ids == VIDEO
    assert not torch.as_tensor(read[0].columns["loss_mask"])[shown].any()


@pytest.fixture
def gemma3n(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny Gemma 3n whose towers, which need timm, are empty."""
    text = {"vocab_size": 96, "vocab_size_per_layer_input": 96, "hidden_size": 64, "hidden_size_per_layer_input": 8}
    text |= {"intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"head_dim": 16, "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]}
    text |= {"sliding_window": 12, "laurel_rank": 4, "activation_sparsity_pattern": [0.0, 0.0], "pad_token_id": 0}
    config = CONFIG_MAPPING["gemma3n"](text_config=text)
    own = modeling_gemma3n.AutoModel.from_config
    monkeypatch.setattr(
        modeling_gemma3n.AutoModel,
        "from_config",
        lambda part, **given: own(part, **given) if part.model_type == "gemma3n_text" else torch.nn.Identity(),
    )
    torch.manual_seed(0)
    return modeling_gemma3n.Gemma3nForConditionalGeneration(config).train()


def test_gemma3n_is_refused_with_images_and_audio_by_name(gemma3n: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="Gemma3nForConditionalGeneration is not known to be exact with im"):
        VisionReader(gemma3n)
    torch_backend.patch(gemma3n, verify=False)
    batch = collate(documents((5, 9, 7)), capacity=32)
    for name in ("pixel_values", "input_features"):
        with pytest.raises(UnsupportedModelError, match=f"a packed batch came with {name}, and Gemma3nForConditional"):
            gemma3n(**batch, **{name: torch.zeros(1, 3, 16, 16)})
