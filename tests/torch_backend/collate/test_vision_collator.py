"""``PackedCollator(model, processor=...)``: rows of documents with images equal each document alone.

The truth is the family's own processor and model, one document at a time; documents without, with one and with several
images stand in one row.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch.nn import functional as F
from torch.utils.data import DataLoader

import torch_backend
from packing_core.errors import CapacityError, LayoutError, PackingError, UnsupportedError, UnsupportedModelError
from tests.processes import limited
from tests.torch_backend.models import in_float64, tiny
from tests.torch_backend.processors import PROCESSORS, picture, tiny_processor
from tests.torch_backend.vision_models import CASES, FAMILY, IMAGE, VIDEO, image_documents, kinds_of, vision_model
from torch_backend import PackedCollator, PackedMediaDataset
from torch_backend.collate.vision import VisionReader
from torch_backend.hf.anatomy.families import EXACT_KEYS, M_ROPE

TOLERANCE = 1e-5
IN_FLOAT64 = ("qwen3_5_moe",)  # in float32 its scan rounds by 2e-5 of the tower's largest gradient
RAW = [*PROCESSORS]


def chat(
    *media: Any, ask: str = "w5 w6", answer: str = "w7 w8 w9", column: str = "images", **more: Any
) -> dict[str, Any]:
    turns = [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
    return {"messages": turns, column: list(media), **more}


# one row: | text | one image | three images |, another: | two images | text | one image |
CHATS = [
    chat(ask="w4"),
    chat(picture(1), answer="w10 w11"),
    chat(picture(2), picture(3), picture(4)),
    chat(picture(5), picture(6), ask="w20 w21 w22"),
    chat(ask="w30 w31", answer="w32"),
    chat(picture(7)),
]
CAPACITY = {"llava": 80}  # of a family whose images take more tokens


def processed(
    processor: Any, example: dict[str, Any], media: Any = None, kind: str = "image", token: int = IMAGE, **options: Any
) -> dict[str, Any]:
    """Returns the processor's result for a chat, with labels at text alone; media stand before the user's text."""
    user, assistant = example["messages"]
    parts = [{"type": kind, kind: each} for each in (example["images"] if media is None else media)]
    turns = [
        {"role": "user", "content": [*parts, {"type": "text", "text": user["content"]}]},
        {"role": "assistant", "content": [{"type": "text", "text": assistant["content"]}]},
    ]
    found = processor.apply_chat_template(
        [turns],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"add_special_tokens": False, **options},
    )
    return {**found, "labels": found["input_ids"].masked_fill(found["input_ids"] == token, -100)}


def update(model: Any, batches: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The mean loss over all targets of the batches, and the gradient of every parameter."""
    losses, count = [], 0
    for batch in batches:
        labels = batch["labels"][:, 1:].reshape(-1)
        logits = model(**{name: x for name, x in batch.items() if name != "labels"}).logits[:, :-1]
        losses.append(F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels, reduction="sum"))
        count += int((labels != -100).sum())
    loss = torch.stack(losses).sum() / count
    model.zero_grad()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def assert_same(
    got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tower: tuple[str, ...] = ("vision", "visual")
) -> None:
    """Loss and gradients agree, those of the tower and the decoder, against the largest of each part."""
    assert got.keys() == want.keys()
    towers = [name for name in want if any(part in name for part in tower)]
    assert towers and len(towers) < len(want) - 1
    for names in (["loss"], towers, want.keys() - {"loss", *towers}):
        largest = max(float(want[name].abs().max()) for name in names)
        errors = {name: float((got[name] - want[name]).abs().max()) / largest for name in names}
        assert all(error < TOLERANCE for error in errors.values()), errors


def in_dtype_of(model: Any, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(model.dtype) if tensor.is_floating_point() else tensor


def collator_of_processed(model: Any, capacity: int) -> PackedCollator:
    collator = PackedCollator(model, capacity, strategy="sequential")
    collator.vision, collator.pad_id = VisionReader(model), 0
    return collator


@pytest.mark.parametrize("case", CASES)
def test_processed_examples_of_every_family_equal_each_document_alone(case: str) -> None:
    model, rows = vision_model(case), image_documents(case)
    if case in IN_FLOAT64:
        model = in_float64(model)
    documents = [document for row in rows for document in row]
    m_rope = FAMILY.get(case, case) in M_ROPE
    batches = []
    for document in documents:
        labels = document.ids.masked_fill((document.ids == IMAGE) | (document.ids == VIDEO), -100)[None]
        document.images = {name: in_dtype_of(model, tensor) for name, tensor in document.images.items()}
        batches.append({"input_ids": document.ids[None], "labels": labels, **document.images})
        batches[-1] |= kinds_of(case, document)
        if case.startswith("paligemma"):  # no token of the prefix is trained
            labels.masked_fill_(batches[-1]["token_type_ids"] == 0, -100)
    truth = update(model, batches)
    collate = collator_of_processed(model, sum(len(document.ids) for document in rows[0]))
    prefixes = [kinds_of(case, document) if case.startswith("paligemma") else {} for document in documents]
    batch = collate(
        [
            {"input_ids": document.ids.tolist(), **document.images, **kinds}
            for document, kinds in zip(documents, prefixes, strict=True)
        ]
    )
    assert batch["input_ids"].shape[0] == 2 and len(batch["packed_documents"]) == 5
    assert batch["position_ids"].ndim == (3 if m_rope else 2)
    batch |= {name: in_dtype_of(model, x) for name, x in batch.items() if isinstance(x, torch.Tensor)}
    assert_same(update(torch_backend.patch(model, verify=False), [batch]), truth)


@pytest.mark.parametrize("case", RAW)
def test_raw_chats_equal_each_document_alone(case: str) -> None:
    model, processor = vision_model(case), tiny_processor(case)
    truth = update(model, [processed(processor, example) for example in CHATS])
    collate = PackedCollator(model, CAPACITY.get(case, 48), processor=processor, strategy="sequential")
    batch = collate(CHATS)
    assert len(batch["input_ids"]) > 1
    assert_same(update(torch_backend.patch(model, verify=False), [batch]), truth)
    collate.padding_free = True
    batch = collate(CHATS)
    assert len(batch["input_ids"]) == 1
    assert_same(update(model, [batch]), truth)


def test_prompts_and_completions_of_a_prefix_model_equal_each_document_alone() -> None:
    """PaliGemma: the prompt and its images see both ways, and the completion alone is trained."""
    model, processor = vision_model("paligemma"), tiny_processor("paligemma")
    pairs = [("<image> w4 w5", "w7 w8"), ("<image> w9", "w10 w11 w12"), ("<image> <image> w13", "w14")]
    shown = [[picture(1)], [picture(2)], [picture(3), picture(4)]]
    alone = [
        processor(text=[prompt], images=[images], suffix=[answer], return_tensors="pt", add_special_tokens=False)
        for (prompt, answer), images in zip(pairs, shown, strict=True)
    ]
    assert all(0 < int(found["token_type_ids"].sum()) < 6 for found in alone)
    truth = update(model, [dict(found) for found in alone])
    torch_backend.patch(model, verify=False)
    collate = PackedCollator(model, 48, processor=processor, strategy="sequential")
    raw = [
        {"prompt": prompt, "completion": f"{answer} </s>", "images": images}
        for (prompt, answer), images in zip(pairs, shown, strict=True)
    ]
    batch, given = collate(raw), collate([dict(found) for found in alone])
    assert len(batch["input_ids"]) == 2 and bool((batch["token_type_ids"][-1, -1:] == 1).all())  # padding is no prefix
    for name in ("input_ids", "labels", "token_type_ids", "pixel_values"):
        assert torch.equal(batch[name], given[name]), name
    assert_same(update(model, [batch]), truth)
    with pytest.raises(
        LayoutError, match=r"example 0 has no token after its prefix \(token_type_ids\), whose tokens see"
    ):
        collate([{"text": "<image> w4", "images": [picture(1)]}])


def test_images_of_unequal_room_are_filled_up_by_places_that_are_none() -> None:
    """Gemma 4 marks the room that an image leaves by places of -1."""
    model, documents = vision_model("gemma4"), [d for row in image_documents("gemma4") for d in row if d.images]
    documents[0].images = {name: x[:, :16] for name, x in documents[0].images.items()}
    collate = collator_of_processed(model, 128)
    batch = collate([{"input_ids": d.ids.tolist(), **d.images} for d in documents])
    assert batch["image_position_ids"].shape[1:] == (24, 2)
    assert bool((batch["image_position_ids"][0, 16:] == -1).all())


def test_images_of_unequal_sizes_equal_each_document_alone() -> None:
    model, processor = vision_model("qwen2_5_vl"), tiny_processor("qwen2_5_vl")
    chats = [chat(picture(1, 8, 16), picture(2, 16, 8)), chat(), chat(picture(3, 16, 16), picture(4, 8, 8))]
    truth = update(model, [processed(processor, example) for example in chats])
    batch = PackedCollator(model, 48, processor=processor)(chats)
    assert len({tuple(grid) for grid in batch["image_grid_thw"].tolist()}) > 2
    assert_same(update(torch_backend.patch(model, verify=False), [batch]), truth)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_processed_videos_equal_each_document_alone(family: str) -> None:
    """Two frames a document, of which Qwen2.5-VL's positions also read the seconds between them."""
    model, random = vision_model(family), torch.Generator().manual_seed(4)
    examples = []
    for before, seconds in ((3, 1.0), (6, 3.0)):
        text = torch.randint(4, 70, (before + 3,), generator=random)
        ids = torch.cat([text[:before], torch.full((8,), VIDEO), text[before:]])
        pixels = {"pixel_values_videos": torch.randn(32, 96, generator=random), "video_grid_thw": [[2, 4, 4]]}
        examples.append({"input_ids": ids[None], "mm_token_type_ids": 2 * (ids == VIDEO).int()[None], **pixels})
        if family == "qwen2_5_vl":
            examples[-1]["second_per_grid_ts"] = torch.tensor([seconds])
    truth = update(
        model,
        [
            {
                **example,
                "labels": example["input_ids"].masked_fill(example["input_ids"] == VIDEO, -100),
                "video_grid_thw": torch.tensor(example["video_grid_thw"]),
            }
            for example in examples
        ],
    )
    collate = collator_of_processed(model, 40)
    batch = collate([examples[0], {"input_ids": torch.arange(4, 9)}, examples[1]])
    assert "second_per_grid_ts" not in batch
    # the last frame at 6 + 3 seconds of 4 tokens each; else the last word at 6 + a grid of 2 + 2 words before it
    assert int(batch["position_ids"].max()) == (18 if family == "qwen2_5_vl" else 10)
    batch = collate(examples)
    assert_same(update(torch_backend.patch(model, verify=False), [batch]), truth)


def test_every_form_of_an_image_and_of_an_example_gives_the_same_batch(tmp_path: Any) -> None:
    model, processor = vision_model("qwen2_vl"), tiny_processor("qwen2_vl")
    collate, image = PackedCollator(model, processor=processor), picture(1)
    image.save(path := tmp_path / "image.png")
    stored = {"bytes": path.read_bytes(), "path": None}
    want = collate([chat(image)])
    turns = chat()["messages"]
    for shown in (str(path), path, np.asarray(image), stored, path.read_bytes()):
        inside = [{"type": "image", "image": shown}, {"type": "text", "text": "w5 w6"}]
        place = [{"type": "image"}, {"type": "text", "text": "w5 w6"}]
        forms = [
            chat(shown),
            {"messages": turns, "image": shown},
            {"messages": [{"role": "user", "content": inside}, turns[1]]},
            {"messages": [{"role": "user", "content": place}, turns[1]], "images": [shown]},
        ]
        for form in forms:
            got = collate([form])
            assert got.keys() == want.keys()
            for name, value in want.items():
                assert torch.equal(got[name], value) if isinstance(value, torch.Tensor) else got[name] == value, name


def test_trained_are_the_text_the_assistant_s_turns_or_the_completion_and_never_an_image() -> None:
    model, processor = vision_model("qwen2_vl"), tiny_processor("qwen2_vl")
    chats, answer = [chat(picture(1))], [7, 8, 9, 2]
    every = PackedCollator(model, processor=processor)(chats)["labels"]
    assert every.tolist() == [[-100] * 5 + [69, 5, 6, 71, *answer]]
    turns = PackedCollator(model, processor=processor, loss="assistant")(chats)["labels"]
    assert turns.tolist() == [[-100] * 9 + answer]
    pairs = [{"prompt": chats[0]["messages"][:1], "completion": chats[0]["messages"][1:], "images": chats[0]["images"]}]
    pairs.append({"prompt": "<user> <|image_pad|> w69 w5 w6 <assistant> ", "completion": "w7 w8 w9 </s> "})
    pairs[1]["images"] = chats[0]["images"]
    for pair in pairs:
        batch = PackedCollator(model, processor=processor)([pair])
        assert batch["labels"].tolist() == turns.tolist()
        assert torch.equal(batch["position_ids"], PackedCollator(model, processor=processor)(chats)["position_ids"])
    given = {**processed(processor, chats[0])}
    given["labels"] = given["input_ids"].clone()  # a data set that trains its images by mistake
    assert PackedCollator(model, processor=processor)([given])["labels"].tolist() == every.tolist()


def test_special_tokens_are_those_of_the_text_alone() -> None:
    """A tokenizer that begins every text with one would put it before the template's, and inside an example."""
    model, processor = vision_model("qwen2_vl"), tiny_processor("qwen2_vl")
    pair = {"prompt": "<user> <|image_pad|> w5 <assistant> ", "completion": "w7 w8 </s> ", "images": [picture(1)]}
    examples = [chat(picture(1)), pair]
    collate = PackedCollator(model, processor=processor)
    before = [collate([example])["input_ids"].tolist() for example in examples]
    backend = processor.tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    assert processor.tokenizer("w5")["input_ids"] == [1, 5]
    assert [collate([example])["input_ids"].tolist() for example in examples] == before


def test_a_batch_of_text_alone_works_and_has_no_tensors_of_images() -> None:
    model, processor = vision_model("qwen3_vl"), tiny_processor("qwen3_vl")
    chats = [chat(), chat(ask="w30 w31 w32"), {"text": "w4 w5 w6"}]
    batch = PackedCollator(model, 16, processor=processor)(chats)
    assert not [name for name in batch if "pixel" in name or "grid" in name]
    assert torch.equal(batch["position_ids"][0], batch["position_ids"][2])
    loss = torch_backend.patch(model, verify=False)(**batch).loss
    assert loss.isfinite()


def test_a_collator_pickles_into_a_worker_without_the_weights() -> None:
    model, processor = vision_model("qwen2_5_vl"), tiny_processor("qwen2_vl")
    reader = VisionReader(model, None)
    again = pickle.loads(pickle.dumps(reader))
    assert not [*again.vision.indexer.parameters()]
    document = image_documents("qwen2_5_vl")[0][2]
    found = [one.read({"input_ids": document.ids, **document.images}, "it").columns for one in (reader, again)]
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])
    assert processor is not None


# -- what cannot be used ----------------------------------------------------------------------------------------------

PLACE = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "w5"}]


def bad(kind: str, tmp_path: Any) -> dict[str, Any]:
    torn = tmp_path / "torn.png"
    torn.write_bytes(b"no image")
    turns = chat()["messages"]
    return {
        "torn": chat(torn),
        "absent": chat(tmp_path / "absent.png"),
        "places": {"messages": [{"role": "user", "content": PLACE}, turns[1]], "images": [picture(1)]},
        "marks": {"text": "w5 <|image_pad|> w6", "images": [picture(1), picture(2)]},
        "grid": {"input_ids": [5, *[IMAGE] * 3], "pixel_values": torch.zeros(16, 96), "image_grid_thw": [[1, 4, 4]]},
        "patches": {"input_ids": [5, *[IMAGE] * 4], "pixel_values": torch.zeros(8, 96), "image_grid_thw": [[1, 4, 4]]},
        "pixels": {"input_ids": [5, *[IMAGE] * 4]},
        "video": {"messages": turns, "videos": ["film.mp4"]},
        "foreign": {"input_ids": [5, IMAGE, 6], "pixel_values": torch.zeros(1, 9), "image_sizes": [[16, 16]]},
        "side by side": {
            "input_ids": [5, *[IMAGE] * 8],
            "pixel_values": torch.zeros(32, 96),
            "image_grid_thw": [[1, 4, 4]] * 2,
        },
        "frames": {"input_ids": [5], "pixel_values_videos": torch.zeros(0, 96), "video_grid_thw": torch.zeros(0, 3)},
        "nothing": {"images": [picture(1)]},
    }[kind]


MESSAGES = {
    "torn": r"example 1: image 0 cannot be decoded \(UnidentifiedImageError: .*torn.png.*\): repair it or leave",
    "absent": r"example 1: image 0 cannot be decoded \(FileNotFoundError",
    "places": "example 1 has 2 places for images and 1 images: they must agree",
    "marks": r"example 1 has 1 placeholders <\|image_pad\|> and 2 images: they must agree",
    "grid": "example 1 has 3 image tokens and images of 4: placeholders and images must agree",
    "patches": "example 1 has 8 patches of pixels and grids of 16: they must agree",
    "pixels": "example 1 has 4 image tokens and images of 0: placeholders and images must agree",
    "video": "example 1 has a video: run the processor on it first, and pass input_ids with pixel_values_videos",
    "foreign": r"example 1 has image_sizes of shape \[1, 2\], which Qwen2VLForConditionalGeneration is not known to be",
    "side by side": "example 1: there are 2 images in 1 runs of image tokens: put a token between images",
    "frames": "example 1 has pixel_values_videos without any pixels: leave it out, with its placeholders",
    "nothing": "example 1 has neither messages, prompt and completion, text nor input_ids, only images",
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_an_example_that_cannot_be_used_is_named(kind: str, tmp_path: Any) -> None:
    model, processor = vision_model("qwen2_vl"), tiny_processor("qwen2_vl")
    examples = [chat(picture(1)), bad(kind, tmp_path), chat()]
    with pytest.raises(PackingError, match=MESSAGES[kind]):
        PackedCollator(model, 64, processor=processor)(examples)
    skipping = PackedMediaDataset(examples, 64, model, processor, on_error="skip")
    assert [*skipping.skipped] == [1] and skipping.numbers.tolist() == [0, 2]
    assert skipping.rows.plan.n_documents == 2


@pytest.mark.parametrize("overflow", ["error", "truncate", "split"])
def test_an_image_is_never_cut(overflow: str) -> None:
    model, processor = vision_model("qwen2_vl"), tiny_processor("qwen2_vl")
    collate = PackedCollator(model, 8, processor=processor, overflow=overflow)
    with pytest.raises(
        CapacityError, match=r"example 0 has 18 tokens, 8 of them of images, and capacity is 8.*: raise"
    ):
        collate([chat(picture(1), picture(2))])


def test_what_follows_the_last_image_is_truncated_and_whole_documents_are_dropped() -> None:
    model, processor = vision_model("qwen2_vl"), tiny_processor("qwen2_vl")
    examples = [chat(picture(1)), chat(ask="w4")]
    batch = PackedCollator(model, 8, processor=processor, overflow="truncate", strategy="sequential")(examples)
    assert batch["input_ids"].tolist()[0] == [70, *[IMAGE] * 4, 69, 5, 6] and len(batch["pixel_values"]) == 16
    batch = PackedCollator(model, 8, processor=processor, overflow="drop")(examples)
    assert "pixel_values" not in batch and len(batch["packed_documents"]) == 1


def test_long_text_is_split_and_each_piece_begins_at_position_0() -> None:
    model, processor = vision_model("qwen2_vl"), tiny_processor("qwen2_vl")
    batch = PackedCollator(model, 4, processor=processor, overflow="split")([chat()])
    assert batch["position_ids"][0].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]


def test_a_processor_of_another_family_is_refused() -> None:
    qwen, llava = vision_model("qwen2_vl"), vision_model("llava")
    coarse = tiny_processor("qwen2_vl")
    coarse.image_processor.patch_size = 8
    with pytest.raises(PackingError, match="of Qwen2VLProcessor has patch_size=8 and the tower of .* 4: pass the"):
        PackedCollator(qwen, processor=coarse)
    llava.config.image_token_index = llava.config.image_token_id = 80
    with pytest.raises(PackingError, match=r"LlavaProcessor marks images by the token \[91\] and Llava.* expects \[80"):
        PackedCollator(llava, processor=tiny_processor("llava"))
    with pytest.raises(UnsupportedError, match="example 0 has pixel_values of shape|pixel_attention_mask of shape"):
        PackedCollator(vision_model("llava"), processor=tiny_processor("idefics3"))([chat(picture(1))])
    with pytest.raises(PackingError, match="which has no tokenizer and image_processor"):
        PackedCollator(qwen, processor=tiny_processor("qwen2_vl").tokenizer)


def test_models_and_options_without_packed_images_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(EXACT_KEYS, "gemma3")
    with pytest.raises(UnsupportedModelError, match="Gemma3ForConditionalGeneration is not known to be exact with im"):
        PackedCollator(vision_model("gemma3"), processor=tiny_processor("gemma3"))
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM is not known to be exact with images"):
        PackedCollator(tiny("llama"), processor=tiny_processor("llava"))
    model, processor = vision_model("qwen2_vl"), tiny_processor("qwen2_vl")
    with pytest.raises(PackingError, match="processor= needs the model"):
        PackedCollator(processor=processor)
    with pytest.raises(PackingError, match="loss is \"?'?turns"):
        PackedCollator(model, processor=processor, loss="turns")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="share no prefixes and hide no tokens"):
        PackedCollator(model, processor=processor, share_prefix=True)
    processor.chat_template = processor.chat_template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    with pytest.raises(PackingError, match="example 0: the chat template marks no turn of the assistant"):
        PackedCollator(model, processor=processor, loss="assistant")([chat(picture(1))])


# -- a whole data set -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_s_rows_hold_every_document_once_with_its_own_images(workers: int) -> None:
    model, processor = vision_model("qwen2_vl"), tiny_processor("qwen2_vl")
    examples = CHATS * 2
    truth = update(model, [processed(processor, example) for example in examples])
    rows = PackedMediaDataset(examples, 40, model, processor, seed=3)
    assert rows.plan.n_documents == len(examples) and rows.plan.efficiency >= 0.8
    collate = PackedCollator(model, processor=processor)
    loader = DataLoader(rows, batch_size=2, collate_fn=collate, num_workers=workers)
    with limited():
        batches = [*loader]
    assert_same(update(torch_backend.patch(model, verify=False), batches), truth)


def test_an_example_that_changes_between_its_plan_and_its_row_is_refused() -> None:
    model, processor = vision_model("qwen2_vl"), tiny_processor("qwen2_vl")
    examples = [chat(picture(1))]
    rows = PackedMediaDataset(examples, 16, model, processor)
    examples[0] = chat(picture(1), ask="w30")
    with pytest.raises(LayoutError, match="example 0 has other tokens than when its row was planned"):
        rows[0]
    with pytest.raises(PackingError, match="none of the 1 examples can be used, the first because example 0 is a int"):
        PackedMediaDataset([3], 16, model, processor, on_error="skip")
