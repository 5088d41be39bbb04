"""Tokenizers: loaded from a folder or the hub, trained on the data, and called without what transformers adds."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from packing_core.errors import PackingError, first_line
from packing_core.extras import require
from packing_core.training.job import is_hub_name

_LEARNED = 1 << 25  # characters of which a tokenizer is trained: more change little of a small vocabulary
END, PAD = "<|endoftext|>", "<|pad|>"
_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{% if message['reasoning_content'] %}"
    "{{ '<think>\n' + message['reasoning_content'] + '\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] or '' }}{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raises PackingError where the library ``tokenizers`` panics, which no ``except Exception`` catches."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise PackingError(f"the tokenizer panicked, {first_line(error)}") from error


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a local folder or a hub name, through ``AutoTokenizer``.

    Raises:
        PackingError: there is none, or it needs code of its own to run and ``trust_remote_code`` is False.
    """
    check_tokenizer(name)
    transformers = require("transformers", extra="hf")
    try:
        with panics_as_errors():
            return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # files of the folder may hold anything, and so may what reading them raises
        way_out = ""
        if os.path.isdir(name) and not any(os.path.isfile(os.path.join(name, file)) for file in _FILES):
            way_out = ": the folder has no tokenizer: pass --tokenizer, a folder that save_pretrained of one wrote"
        raise PackingError(f"tokenizer {name}: {first_line(error).rstrip(':')}{way_out}") from error


def check_tokenizer(name: str) -> None:
    """Raise PackingError if ``name`` is no folder and cannot be a hub name; nothing is loaded."""
    if "\0" in name or not (os.path.isdir(name) or is_hub_name(name)):
        raise PackingError(f"tokenizer {name}: no such folder, and not a hub name (`owner/name`)")


def entries(tokenizer: Any) -> int:
    """Returns one more than the largest token id: the number of entries, unless ids are left out."""
    return max(len(tokenizer), *(number + 1 for number in tokenizer.get_vocab().values()))


def vocabulary_digest(tokenizer: Any) -> str:
    """Returns the SHA-256 of the tokens and their ids: where it is the same, token ids mean the same texts."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer of at most ``vocab_size`` entries, trained on the first 32 million characters.

    The same texts give the same tokenizer; what comes after those characters is not read.
    It adds no BOS, ends documents with ``<|endoftext|>``, and writes chats as ChatML.
    """
    tokenizers = require("tokenizers", extra="hf")
    transformers = require("transformers", extra="hf")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD, "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_beginning(texts), trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=PAD)
    tokenizer.chat_template = CHATML
    return tokenizer


def _beginning(texts: Iterable[str]) -> Iterator[str]:
    left = _LEARNED
    for text in texts:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def rust_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer of the ``tokenizers`` library that does all the work of this one; None if there is none.

    Calling it directly saves what transformers makes of its result: masks, lists, a dict.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not getattr(tokenizer, "is_fast", False) or not hasattr(backend, "encode_batch_fast"):
        return None
    probe = ["", " a\n\tb ", "É ü\u0301 \U0001f600 <s>x</s> [CLS]", *map(str, tokenizer.all_special_tokens)]
    expected = tokenizer(probe, add_special_tokens=False)["input_ids"]  # also turns padding and truncation off
    found = [encoding.ids for encoding in backend.encode_batch_fast(probe, add_special_tokens=False)]
    own = type(tokenizer).__module__.startswith("transformers.")  # others may do anything in Python
    return backend if own and found == expected else None
