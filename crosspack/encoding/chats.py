"""Finds what each turn of the assistant wrote into a chat, and checks that the template left nothing of it out.

A template with ``{% generation %}`` blocks marks the turns itself. Any other writes the messages up to a turn, with the
header that asks for it, and up to its end; what lies between is the turn. Doing so for every turn takes time that is
quadratic in their number. So the template also writes the chat with each message's text between two marks, which gives
the text between messages; turns with the same text before and after them begin and end alike, and only the first of
them is written turn by turn.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from crosspack.encoding.layouts import arguments_of
from packing_core.errors import PackingError

Span = tuple[int, int]  # begin and end, in characters
REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of a message's reasoning, the first is written
_BEGIN, _END = "\ue000", "\ue001"  # of the private use area
_THINK = re.compile("</?think>")  # templates take such a text apart


class Write(Protocol):
    """Applies the chat template; ``ask`` adds the header of the assistant's next turn."""

    def __call__(self, messages: Sequence[Any], *, ask: bool = False) -> str: ...


def spans_of_turns(
    write: Write, messages: Sequence[Any], wanted: Sequence[bool], chat: str, blocks: Sequence[Span] | None
) -> dict[int, list[Span]]:
    """Maps each wanted message of the assistant to its characters in the chat.

    Args:
        wanted: of each message, whether it is looked for if it is the assistant's.
        blocks: the ``{% generation %}`` blocks in it; None of a template that marks nothing.

    Raises:
        PackingError: the template writes a turn differently when more follow.
    """
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    for spans in (blocks, _joined(blocks)) if blocks is not None else ():
        if len(spans) == len(turns):
            return {turn: [span] for turn, span in zip(turns, spans, strict=True) if wanted[turn]}
    regions = _regions(write, messages, chat, [turn for turn in turns if wanted[turn]])
    if blocks is None:
        return {turn: [region] for turn, region in regions.items()}
    return {
        turn: [span for span in blocks if begin <= span[0] and span[1] <= end] for turn, (begin, end) in regions.items()
    }


def _joined(blocks: Sequence[Span]) -> list[Span]:
    """Joins blocks of which one ends where the next begins."""
    joined: list[Span] = []
    for begin, end in blocks:
        joined.append((joined.pop()[0], end) if joined and joined[-1][1] == begin else (begin, end))
    return joined


def _regions(write: Write, messages: Sequence[Any], chat: str, turns: Sequence[int]) -> dict[int, Span]:
    """Maps each of the turns to what lies between the header that asks for it and its end."""
    texts = _texts(write, messages, chat)
    known: dict[tuple[str, str], Span] = {}  # text before and after a turn's text -> characters that belong to the turn
    regions = {}
    for turn in turns:
        around = _around(chat, texts, turn)
        if around not in known:
            begin, end = _region(write, messages, chat, turn, texts)
            if around is None:
                regions[turn] = begin, end
                continue
            known[around] = texts[turn][0] - begin, end - texts[turn][1]
        head, tail = known[around]
        regions[turn] = texts[turn][0] - head, texts[turn][1] + tail
    return regions


def _region(write: Write, messages: Sequence[Any], chat: str, turn: int, texts: dict[int, Span]) -> Span:
    """Returns where a turn begins and ends, by writing the chat up to it.

    Few templates write a chat of no message, or of none by a user. So a turn that no user asked for is written behind a
    question, and looked for in the chat. Some write a turn differently when more follow, such as without its reasoning:
    such a turn begins behind its header and ends as far behind its text as it does when none follow.
    """
    earlier, header = list(messages[:turn]), ""
    plain = isinstance(messages[turn].get("content"), str)
    question = {"role": "user", "content": "?" if plain else [{"type": "text", "text": "?"}]}
    if not any(message["role"] == "user" for message in earlier):
        earlier.append(question)
    before, after = write(earlier, ask=True), write([*earlier, messages[turn]])
    if len(earlier) > turn:
        header = before.removeprefix(write(earlier))
        said = header + after.removeprefix(before)
        same = (a == b for a, b in zip(chat, before, strict=False))
        parting = sum(itertools.takewhile(bool, same))  # inside of the header, or before it
        begin = chat.find(said, max(0, parting - len(header)), parting + len(said))
    else:
        begin = len(before) if chat.startswith(after) else -1
    if begin < 0 or not after.startswith(before):
        asked = [*earlier, question] if earlier[-1]["role"] == "assistant" else earlier
        asks = write(asked, ask=True).removeprefix(write(asked))
        open_ended = write([*earlier, messages[turn]], ask=True)  # some end a last turn otherwise
        for last in (after, open_ended.removesuffix(asks)):
            if (span := _around_text(chat, texts, turn, asks, last)) is not None:
                return span
        raise PackingError(
            f"the chat template writes message {turn} differently when more follow, so what the assistant says cannot "
            "be marked: pass --loss all, or a template with {% generation %}"
        )
    return begin + len(header), begin + len(header) + len(after) - len(before)


def _around_text(chat: str, texts: dict[int, Span], turn: int, header: str, last: str) -> Span | None:
    """Returns where a turn begins and ends in a chat, by its text; None if its header or its end are not found there.

    Args:
        last: the chat up to the turn's end, as the template writes it if no message follows.
    """
    header = _THINK.split(header)[0]  # what asks for reasoning is written before an answer that has some
    if turn not in texts or not header:
        return None
    begin, end = texts[turn]
    _, text, tail = last.rpartition(chat[begin:end])
    head = chat[texts[turn - 1][1] if turn - 1 in texts else 0 : begin]
    if not text or not tail or head.count(header) != 1 or not chat.startswith(tail, end):
        return None
    return begin - len(head.partition(header)[2]), end + len(tail)


def _texts(write: Write, messages: Sequence[Any], chat: str) -> dict[int, Span]:
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


def _around(chat: str, texts: dict[int, Span], turn: int) -> tuple[str, str] | None:
    """The text between a message's text and those of its neighbours; None where they are not known."""
    if turn not in texts:
        return None
    before = texts[turn - 1][1] if turn - 1 in texts else 0
    after = texts[turn + 1][0] if turn + 1 in texts else len(chat)
    return chat[before : texts[turn][0]], chat[texts[turn][1] : after]


def lost_field(text: str, message: Mapping[str, Any]) -> str | None:
    """Names a field of a message that a :func:`squeezed` text lacks; None if it has all, each in a place of its own.

    White space does not count, which templates trim, nor does how a call writes its arguments: as JSON, or bare.

    >>> lost_field("Yes.<|im_end|>", {"content": "Yes.", "reasoning_content": "Well"})
    'reasoning_content'
    """
    fields, lost = list(_fields(message)), set[str]()
    used, starts = bytearray(len(text)), dict[str, int]()  # characters that a field has; where to look for it again
    for name, value in sorted(fields, key=lambda field: -len(str(field[1]))):  # the shorter may be a part of the longer
        for form in _forms(value):
            at = text.find(form, starts.get(form, 0))
            while at >= 0 and (last := used.rfind(1, at, at + len(form))) >= 0:
                at = text.find(form, last + 1)
            if at >= 0:
                used[at : at + len(form)] = b"\1" * len(form)
                starts[form] = at + len(form)
                break
        else:
            lost.add(name)
    return next((name for name, _ in fields if name in lost), None)


def _fields(message: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the name and the text or number of all that a message says."""
    if (name := next((name for name in REASONING if message.get(name) is not None), None)) is not None:
        yield from ((name, leaf) for leaf in _leaves(message[name]))
    content = message.get("content")
    if isinstance(content, str):
        yield from (("content", part) for part in _THINK.split(content))
    for part in content if isinstance(content, list) else [content] if isinstance(content, Mapping) else ():
        said = {k: v for k, v in part.items() if k not in ("type", "id")} if isinstance(part, Mapping) else part
        yield from (("content", leaf) for leaf in _leaves(list(said.values()) if isinstance(said, dict) else said))
    yield from (("refusal", leaf) for leaf in _leaves(message.get("refusal")))
    calls = message.get("tool_calls") or [message.get("function_call") or {}]
    for call in calls if isinstance(calls, list) else [calls]:
        function = (call.get("function") or call) if isinstance(call, Mapping) else {"name": call}
        name = f"the call of {function.get('name')}"
        yield from ((name, leaf) for leaf in _leaves(function.get("name")))
        yield from ((f"an argument of {name}", leaf) for leaf in _leaves(arguments_of(function.get("arguments"))))


def _leaves(value: Any) -> Iterator[Any]:
    """Yields the texts and numbers in a nested value, and the keys of those that are not null."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if inner is not None:
                yield key
                yield from _leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    elif value is not None:
        yield value


def _forms(value: Any) -> Iterator[str]:
    """Yields the ways in which templates write a text or a number, without white space."""
    if isinstance(value, str):
        yield squeezed(value)
        yield squeezed(repr(value)[1:-1])
        for ascii_only in (False, True):
            once = json.dumps(value, ensure_ascii=ascii_only)[1:-1]
            yield squeezed(once)
            yield squeezed(json.dumps(once, ensure_ascii=ascii_only)[1:-1])  # arguments that were JSON in a string
    else:
        yield from (str(value), json.dumps(value, default=str))


def squeezed(text: str) -> str:
    """Returns a text without its white space."""
    return "".join(text.split())


def in_spans(chat: str, begins: NDArray[np.int64], ends: NDArray[np.int64], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """bool [T]: whether each token shares a character with one of the spans, which are in order.

    White space around a token does not count: tokenizers add it to the next word, or drop it.

    Args:
        begins, ends: int64 [T], the characters of the tokens, in order. A token without any, of trimmed white space,
            has those since the token before it.
    """
    if not spans or not len(begins):
        return np.zeros(len(begins), np.bool_)
    begins = np.where(begins == ends, np.minimum(np.append(0, np.maximum.accumulate(ends)[:-1]), ends), begins)
    solid = np.flatnonzero(~np.char.isspace(np.array([chat]).view("U1")))  # characters that are no white space
    first, last = np.searchsorted(solid, begins), np.searchsorted(solid, ends)
    has = first < last
    begins[has], ends = solid[first[has]], ends.copy()
    ends[has] = solid[last[has] - 1] + 1
    firsts, lasts = np.array(spans, np.int64).T
    span = np.searchsorted(firsts, ends) - 1
    return (span >= 0) & (begins < lasts[span])
