"""Long texts give the tokens that they give whole, in memory that is a small multiple of theirs."""

from __future__ import annotations

import json
import random
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers as hf
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, trainers

from crosspack.encoding.long_texts import LongTexts, may_be_cut, pieces_of
from crosspack.encoding.text import Encoder, Policy
from packing_core.errors import PackingError
from tests import processes

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text() + (ROOT / "docs" / "cli.md").read_text()
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
_QWEN = [
    pre_tokenizers.Split(hf.Regex(_GPT4), "isolated"),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
]
_LLAMA_2 = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
KINDS: dict[str, tuple[Any, Any]] = {  # normalizer, and what cuts words
    "byte-level": (None, _BYTE_LEVEL),
    "qwen": (normalizers.NFC(), pre_tokenizers.Sequence(_QWEN)),
    "prefix space": (None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "llama 2": (normalizers.Sequence(_LLAMA_2), None),
    "sentences": (None, None),
    "words": (None, pre_tokenizers.Whitespace()),
}


def trained(kind: str) -> hf.Tokenizer:
    """A tokenizer of the kind of a well-known family, trained once on a text whose lines are repeated."""
    return hf.Tokenizer.from_str(_trained(kind))


@cache
def _trained(kind: str) -> str:
    pieces = kind == "words"
    made = hf.Tokenizer(models.WordPiece(unk_token="?") if pieces else models.BPE())
    for name, part in zip(("normalizer", "pre_tokenizer"), KINDS[kind], strict=True):
        if part is not None:
            setattr(made, name, part)
    trainer = trainers.WordPieceTrainer if pieces else trainers.BpeTrainer
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind in ("byte-level", "qwen") else []
    options = {"vocab_size": 1500, "special_tokens": ["?"], "show_progress": False}
    made.train_from_iterator(TEXT.splitlines(keepends=True), trainer(initial_alphabet=alphabet, **options))
    return str(made.to_str())


def ids(backend: Any, text: str) -> list[int]:
    return backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", ["byte-level", "qwen"])
def test_pieces_have_the_tokens_of_the_whole_text(kind):
    backend = trained(kind)
    assert may_be_cut(backend)
    pieces = pieces_of(TEXT, 50)
    assert len(pieces) > 400 and "".join(pieces) == TEXT
    assert [token for piece in pieces for token in ids(backend, piece)] == ids(backend, TEXT)


@pytest.mark.parametrize("kind", ["prefix space", "llama 2", "sentences", "words"])
def test_a_tokenizer_whose_tokens_could_differ_gets_texts_whole(kind):
    backend = trained(kind)
    assert not may_be_cut(backend)
    long = TEXT * 20
    assert LongTexts(backend).pieces(long) == [long]


@pytest.mark.parametrize("added", [{"rstrip": True}, {"single_word": True}, None], ids=str)
def test_an_added_token_that_looks_beyond_a_cut_or_spans_one_forbids_it(added):
    backend = trained("byte-level")
    backend.add_tokens([hf.AddedToken("END", **added) if added else "of the"])
    assert not may_be_cut(backend)


_TEXTS = st.lists(st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from([" ", "\n", "a", " b", "\nc"]))


@pytest.fixture(scope="module")
def qwen() -> hf.Tokenizer:
    return trained("qwen")


@given(parts=_TEXTS)
def test_any_text_in_pieces_has_its_tokens(qwen, parts):
    text = "".join(parts)
    assert [token for piece in pieces_of(text, 3) for token in ids(qwen, piece)] == ids(qwen, text)


def test_documents_of_long_texts_completions_and_chats_are_those_of_whole_ones(tokenizer, monkeypatch):
    text = TEXT * 3
    records = [
        {"text": text},
        {"prompt": text, "completion": f" {text}"},
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]},
    ]
    cut = list(Encoder(tokenizer, Policy())(records))
    monkeypatch.setattr(LongTexts, "pieces", lambda self, text: [text])
    whole = list(Encoder(tokenizer, Policy())(records))
    for found, right in zip(cut, whole, strict=True):
        assert found.ids.tolist() == right.ids.tolist() and found.trained.tolist() == right.trained.tolist()


def test_a_text_that_cannot_be_cut_is_refused_by_its_place_or_left_out(tokenizer):
    encoder = Encoder(tokenizer, Policy())
    encoder.limit(1 << 20)
    records = [{"text": "a word"}, {"text": "x" * 200_000}, {"text": "another"}]
    with pytest.raises(
        PackingError, match=r"record 1: it has 200,000 characters without a place to cut it.*record 2MB"
    ):
        list(encoder(records))
    refused: list[Any] = []
    assert len(list(encoder.encoded(records, lambda bad, error: refused.append(bad)))) == 2
    assert len(refused) == 1
    encoder.limit(2 << 20)
    assert len(list(encoder(records))) == 3


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and macOS has no limit of the address space")
def test_a_record_takes_at_most_twelve_times_its_bytes(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    words, size = TEXT.split(), 6 << 20
    random.Random(0).shuffle(words)
    text = " ".join(words * (size // sum(len(word) + 1 for word in words)))
    for name, content in {"small": "a few words", "large": text}.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": content}) + "\n")

    def pack(name: str, limit: int) -> int:
        given = ["--tokenizer", tmp_path / "tokenizer", "--overflow", "split", "--output", tmp_path / name]
        program = (
            "import re, resource, sys; from pathlib import Path\n"
            f"resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))\n"
            "from crosspack.cli import app\n"
            "try: app()\n"
            "except SystemExit as ended: assert not ended.code, ended.code\n"
            "print(re.search(r'VmPeak:\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1])"
        )
        command = [sys.executable, "-c", program, "pack", "--data", tmp_path / f"{name}.jsonl", "--workers", 1, *given]
        ended = processes.run(list(map(str, command)))
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return int(ended.stdout.split()[-1]) << 10

    base = pack("small", 1 << 40)
    pack("large", base + 12 * size)
