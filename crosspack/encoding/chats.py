"""Finds the assistant's characters of a chat whose template has no ``{% generation %}`` to mark them.

The template writes the messages up to a turn, with the header that asks for it, and up to its end; what lies between
is the turn. Doing so for every turn takes time that is quadratic in their number. So the template also writes the chat
with each message's text between two marks, which gives the text between messages; turns with the same text before and
after them begin and end alike, and only the first of them is written turn by turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from packing_core.errors import PackingError

_BEGIN, _END = "\ue000", "\ue001"  # of the private use area


class Write(Protocol):
    """Applies the chat template; ``ask`` adds the header of the assistant's next turn."""

    def __call__(self, messages: Sequence[Any], *, ask: bool = False) -> str: ...


def assistant_spans(write: Write, messages: Sequence[Any], wanted: Sequence[bool]) -> tuple[str, list[tuple[int, int]]]:
    """The chat, and the begin and end of each turn of the assistant in it.

    Args:
        write: applies the chat template.
        messages: the chat.
        wanted: of each message, whether it is looked for if it is the assistant's.

    Raises:
        PackingError: the template writes a turn differently when more follow.
    """
    chat = write(messages)
    texts = _texts(write, messages, chat)
    known: dict[
        tuple[str, str], tuple[int, int]
    ] = {}  # text before and after a turn's text -> what belongs to the turn
    spans = []
    for turn in np.flatnonzero(wanted).tolist():
        if messages[turn]["role"] != "assistant":
            continue
        around = _around(chat, texts, turn)
        if around not in known:
            before, after = write(messages[:turn], ask=True), write(messages[: turn + 1])
            if not chat.startswith(after) or not after.startswith(before):
                raise PackingError(
                    f"the chat template writes message {turn} differently when more follow, so what the assistant says "
                    f"cannot be marked: pass --loss all, or a template with {{% generation %}}"
                )
            if around is None:
                spans.append((len(before), len(after)))
                continue
            known[around] = texts[turn][0] - len(before), len(after) - texts[turn][1]
        head, tail = known[around]
        spans.append((texts[turn][0] - head, texts[turn][1] + tail))
    return chat, spans


def check_calls(chat: str, messages: Sequence[Any]) -> None:
    """Checks that a chat holds the tools that its messages call; a template that knows of none leaves calls out.

    Raises:
        PackingError: it leaves one out.
    """
    for number, message in enumerate(messages):
        for call in message.get("tool_calls") or ():
            name = (call.get("function") or call).get("name")
            if str(name) not in chat:
                raise PackingError(
                    f"the chat template does not write the call of {name} in message {number}: pass a --tokenizer "
                    "whose template writes tool calls"
                )


def in_spans(starts: NDArray[np.int64], spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """bool [T]: whether each of ``starts`` [T] lies in one of the spans, which are in order."""
    if not spans:
        return np.zeros(len(starts), np.bool_)
    begins, ends = np.array(spans, np.int64).T
    span = np.searchsorted(begins, starts, side="right") - 1
    return (span >= 0) & (starts < ends[span])


def _texts(write: Write, messages: Sequence[Any], chat: str) -> dict[int, tuple[int, int]]:
    """Message -> begin and end of its text in the chat; empty if the template does not write all texts as they are."""
    marked, texts = [], {}
    for number, message in enumerate(messages):
        content = message.get("content")
        text = content.strip() if isinstance(content, str) else ""
        if text:
            texts[number] = text
            begin = content.index(text)
            around = content[:begin], content[begin + len(text) :]
            message = {**message, "content": f"{around[0]}{_BEGIN}{text}{_END}{around[1]}"}
        marked.append(message)
    pieces = write(marked).replace(_END, _BEGIN).split(_BEGIN)
    if "".join(pieces) != chat or len(pieces) != 2 * len(texts) + 1 or pieces[1::2] != list(texts.values()):
        return {}
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    return {number: (ends[2 * i], ends[2 * i + 1]) for i, number in enumerate(texts)}


def _around(chat: str, texts: dict[int, tuple[int, int]], turn: int) -> tuple[str, str] | None:
    """The text between a message's text and those of its neighbours; None where they are not known."""
    if turn not in texts:
        return None
    before = texts[turn - 1][1] if turn - 1 in texts else 0
    after = texts[turn + 1][0] if turn + 1 in texts else len(chat)
    return chat[before : texts[turn][0]], chat[texts[turn][1] : after]
