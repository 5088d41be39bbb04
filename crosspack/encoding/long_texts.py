"""Long texts cut where a tokenizer's result does not depend on it.

A tokenizer holds a hundred times the bytes of a text while it works on it, so a long one goes through it in pieces.
It is cut between a word and the space before the next, or between a line break and the next word, where that changes
nothing:

- no token holds both characters beside the cut, so that none could span it, and
- the tokenizer treats a piece as it does the same text inside a longer one, which is tried on many pairs of pieces.

Tokenizers for which one of these does not hold, those that write a space in front of every text among them, get long
texts whole.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

from crosspack.reading.files import MAX_RECORD
from packing_core.errors import PackingError

FACTOR = 10  # by which a tokenizer takes more memory than all else that is done with a text
PIECE = 1 << 16  # characters of a piece, or more where none of the cuts is near
_CUTS = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])|(?<=\n)(?=[^\W\d_])")
_SPANNING = re.compile(r"[A-Za-z] +[A-Za-z]|[A-Za-z] $|\n[^\W\d_]")
_MODELS = ("BPE", "Unigram")  # whose segmentation of a text is that of its parts where no token spans their border
_PAIRS = 512
_BITS = [
    *("word", "Another", "it's", "they'll", "don't", "a", "I", "Zürich", "naïve", "über", "日本語", "слово", "e\u0301"),
    *("12", "3.14", "x_1", "(", ")", '"', "'", "--", "...", "!?", ",", ";", "{}", "<s>", "</s>", "#", "@"),
    *("\U0001f600", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u200b"),
]


class LongTexts:
    """Cuts long texts for a tokenizer of the library ``tokenizers``; for None, an other tokenizer, it cuts none.

    Attributes:
        longest: characters that may go through the tokenizer at once.
    """

    def __init__(self, backend: Any) -> None:
        self.longest = MAX_RECORD // FACTOR
        self._backend = backend
        self._cuts: bool | None = None  # found with the first long text

    def pieces(self, text: str) -> list[str]:
        """Returns pieces whose tokens, one after the other, are those of the text: several of a long one.

        Raises:
            PackingError: a part that cannot be cut is too long.
        """
        if len(text) <= 2 * PIECE:
            return [text]
        if self._cuts is None:
            self._cuts = self._backend is not None and may_be_cut(self._backend)
        pieces = pieces_of(text) if self._cuts else [text]
        if (most := max(map(len, pieces))) > self.longest:
            why = "without a place to cut it" if self._cuts else "and this tokenizer takes a text at once"
            raise PackingError(
                f"it has {most:,} characters {why}, which takes {FACTOR} times the memory of other texts: split it, or "
                f"pass --max-record {-(-most * FACTOR >> 20)}MB"
            )
        return pieces


def pieces_of(text: str, size: int = PIECE) -> list[str]:
    """Cuts a text into pieces of about ``size`` characters, in order; joined, they are the text.

    >>> pieces_of("one two three", 4)
    ['one two', ' three']
    """
    pieces, begin = [], 0
    while len(text) - begin > size and (found := _CUTS.search(text, begin + size)):
        pieces.append(text[begin : found.start()])
        begin = found.start()
    return [*pieces, text[begin:]]


def may_be_cut(backend: Any) -> bool:
    """Returns whether a tokenizer's tokens of a text are those of its :func:`pieces_of`."""

    def encode(text: str) -> list[int]:
        return list(backend.encode(text, add_special_tokens=False).ids)

    described = json.loads(backend.to_str())
    model = described["model"]
    if model.get("type") not in _MODELS or model.get("dropout") or model.get("end_of_word_suffix"):
        return False
    added = described.get("added_tokens") or []
    if any(token["rstrip"] or token["single_word"] for token in added):  # which look at what stands beside them
        return False
    if any(_SPANNING.search(_as_text(token)) for token in backend.get_vocab(with_added_tokens=True)):
        return False
    draw = random.Random(0)
    for _ in range(_PAIRS):
        left, right = ("".join(draw.choices(_BITS, k=draw.randint(1, 8))) for _ in range(2))
        before, after = (f"{left}a", f" b{right}") if draw.random() < 0.5 else (f"{left}\n", f"b{right}")
        if encode(before + after) != encode(before) + encode(after):
            return False
    return True


def _as_text(token: str) -> str:
    """Returns a token as text: byte-level tokens write a space as Ġ and a line break as Ċ, others a space as ▁."""
    return token.replace("Ġ", " ").replace("Ċ", "\n").replace("▁", " ")
