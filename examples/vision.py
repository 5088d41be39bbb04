"""Chats with no, one and several images in packed rows, trained with a tiny LLaVA that is made here.

Run it: python examples/vision.py
Needs: pip install 'crosspack[hf]'
"""

try:
    import torch
    from PIL import Image
    from tokenizers import Tokenizer, models, pre_tokenizers
    from torch.utils.data import DataLoader
    from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor, PreTrainedTokenizerFast
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    import crosspack
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'crosspack[hf]'") from None

# -- a tiny model and its processor; yours come from from_pretrained --
words = ["<pad>", "<image>", "<user>", "<assistant>", "what", "color", "is", "it", "red", "green", "blue", "hello"]
splitter = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
splitter.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=splitter, pad_token="<pad>")
tokenizer.add_tokens(["<image>"], special_tokens=True)
template = (
    "{% for turn in messages %} <{{ turn['role'] }}> {% for part in turn['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }} {% endfor %}{% endfor %}"
)
pictures = CLIPImageProcessorPil(size={"height": 16, "width": 16}, do_center_crop=False)
sizes = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
processor = LlavaProcessor(pictures, tokenizer, chat_template=template, **sizes)
layers = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
text = {"model_type": "llama", "vocab_size": 16, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, **layers}
tower = {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 4, **layers}
torch.manual_seed(0)
config = LlavaConfig(text_config=text, vision_config=tower, image_token_index=1, vision_feature_layer=-1)
model = crosspack.patch(LlavaForConditionalGeneration(config), verify=False).train()


def chat(*colors: str) -> dict:
    """A chat about images of single colors, or a greeting."""
    answer = " ".join(colors) or "hello"
    turns = [{"role": "user", "content": "what color is it"}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "images": [Image.new("RGB", (16, 16), color) for color in colors]}


examples = [chat(), chat("red"), chat("green", "blue"), chat("blue"), chat(), chat("red", "red", "green")] * 4

# -- whole data set to rows; workers of the loader decode the images --
rows = crosspack.PackedMediaDataset(examples, 128, model, processor, seed=0)
print(f"{len(examples)} chats in {len(rows)} rows, {rows.plan.efficiency:.0%} full")
collate = crosspack.PackedCollator(model, processor=processor)
step = crosspack.make_train_step(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
for epoch in range(3):
    losses = [float(step(batch)["loss"]) for batch in DataLoader(rows, batch_size=2, collate_fn=collate)]
    print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}")
