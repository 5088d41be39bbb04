"""A tiny language model with a tokenizer of words, and documents as tokens and as text, in files that stacks read."""

from __future__ import annotations

import json
from pathlib import Path

WORDS = 60
DOCUMENTS = 24


def make_data(folder: Path) -> None:
    """Write ``model``, ``tokens.jsonl`` and ``chats.jsonl`` into a folder, the same ones each time."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    words = ["<unk>", "<s>", "</s>", "<pad>", *(f"w{number}" for number in range(WORDS))]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.save_pretrained(folder / "model")

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    config = LlamaConfig(vocab_size=len(words), num_key_value_heads=2, max_position_embeddings=256, **sizes, **ids)
    LlamaForCausalLM(config).save_pretrained(folder / "model")

    tokens, chats = [], []
    for length in torch.randint(4, 30, (DOCUMENTS,)).tolist():
        document = torch.randint(4, len(words), (length,)).tolist()
        tokens.append({"input_ids": document, "attention_mask": [1] * length, "labels": [-100, -100, *document[2:]]})
        prompt, answer = (" ".join(words[i] for i in part) for part in (document[:2], document[2:]))
        chats.append({"instruction": prompt, "input": "", "output": answer})
    for name, rows in (("tokens", tokens), ("chats", chats)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
