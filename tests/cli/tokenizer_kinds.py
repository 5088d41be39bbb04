"""Small tokenizers of the kinds that models have: what they do with white space, case and offsets differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
_UNKNOWN = SPECIAL["unk_token"]
_BYTES = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
_SPACES = [normalizers.NFKC(), normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(r"\s+"), " ")]
_AS_TEXT = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
# Kind -> model, normalizer, what cuts words, decoder, trainer with its options.
KINDS: dict[str, tuple[Any, Any, Any, Any, Any, dict[str, Any]]] = {
    # As GPT-2, Qwen and Llama 3: keeps every byte.
    "byte-level BPE": (
        models.BPE,
        None,
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
        trainers.BpeTrainer,
        _BYTES,
    ),
    # As T5: writes a space in front, joins several, and drops those at the end.
    "Unigram": (
        models.Unigram,
        normalizers.Sequence(_SPACES),
        pre_tokenizers.Metaspace(),
        decoders.Metaspace(),
        trainers.UnigramTrainer,
        {"unk_token": _UNKNOWN},
    ),
    # As BERT: drops all white space, and case.
    "WordPiece": (
        lambda: models.WordPiece(unk_token=_UNKNOWN),
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
        decoders.WordPiece(),
        trainers.WordPieceTrainer,
        {},
    ),
    # As Llama 2: writes a space in front of each text between special tokens, and bytes of unknown characters.
    "BPE with byte fallback": (
        lambda: models.BPE(unk_token=_UNKNOWN, fuse_unk=True, byte_fallback=True),
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        None,
        decoders.Sequence(_AS_TEXT),
        trainers.BpeTrainer,
        {"special_tokens": [*SPECIAL.values(), *(f"<0x{byte:02X}>" for byte in range(256))]},
    ),
}


def tokenizer_of(kind: str, texts: Sequence[str]) -> Any:
    """A tokenizer of one of the ``KINDS``, trained on the texts."""
    from transformers import PreTrainedTokenizerFast

    model, normalizer, words, decoder, trainer, options = KINDS[kind]
    made = Tokenizer(model())
    for name, part in (("normalizer", normalizer), ("pre_tokenizer", words), ("decoder", decoder)):
        if part is not None:
            setattr(made, name, part)
    if words is None:  # no token spans a space, as pieces of Llama's do not
        texts = [word for text in texts for word in text.split(" ")]
    given = {"special_tokens": list(SPECIAL.values()), "vocab_size": 1000, "show_progress": False}
    made.train_from_iterator(texts, trainer(**given | options))
    return PreTrainedTokenizerFast(tokenizer_object=made, **SPECIAL)
