"""Layouts of records that others made common: ShareGPT's conversations, Alpaca's instructions, columns by any name.

A record goes in; one with the columns that the encoder knows comes out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from crosspack.encoding.tokens import COLUMNS as TOKEN_COLUMNS
from packing_core.batches.media import KINDS, kind_of, tools_of
from packing_core.errors import PackingError

COLUMNS = ("conversations", "instruction", "input", "output", "system", "history", "chosen", "rejected", "label")
# who speaks in ShareGPT's files -> the role in a chat template
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
SPOKEN = ("system", "developer", "user", "assistant", "tool", "function")  # roles that chat templates have
CALLS = ("function_call", "tool_call")  # who speaks where the assistant calls a tool, by JSON
CHATS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")  # columns that may hold messages
LOOKED_AT = 100  # first records that say what a data set has: the columns of --keep, images for a model of text
_KNOWN = ("input_ids", "messages", "prompt", "text")  # a record with one of these is taken as it is


def canonical(
    record: Mapping[str, Any], where: Any, fields: tuple[tuple[str, str], ...], *, media: bool = False
) -> Mapping[str, Any]:
    """The record with the columns ``text``, ``prompt`` and ``completion``, ``messages`` or ``input_ids``.

    Args:
        fields: (name, column) pairs: ``(("text", "body"),)`` takes the column ``body`` for the text. With any, no other
            layout is looked for; labels and marks of token ids keep their names.
        media: whether the record may have media.

    Raises:
        PackingError: it has not the columns of ``fields``, a conversation is not as ShareGPT writes it, it has a
            ``system`` for which there is no place, or media. With ``fields`` these are looked for in the columns that
            they name, and all other columns are left out.
    """
    if fields:
        missing = [column for _, column in fields if record.get(column) is None]
        if missing:
            raise PackingError(f"{where} has no {missing[0]}, only {', '.join(map(str, record)) or 'no column'}")
        named = {name: record[column] for name, column in fields}
        _refuse_images(named, where)
        if isinstance(found := named.get("messages"), list):
            named["messages"] = _messages(found, where)
        if "input_ids" in named:
            named = {name: record[name] for name in TOKEN_COLUMNS if name in record} | named
        return _Renamed(named, record)
    if record.get("input_ids") is not None:
        return record
    chat = record.get("messages")
    if chat is None and not any(record.get(name) is not None for name in _KNOWN):
        chat = record.get("conversations")
    if not media:
        _refuse_images(record, where)
    if isinstance(chat, list):
        return _chat(chat, record, where)
    if record.get("prompt") is not None and record.get("completion") is not None:
        return _prompted(record, where)
    if any(record.get(name) is not None for name in _KNOWN):
        return record
    if isinstance(record.get("instruction"), str) and isinstance(record.get("output"), str):
        return _Renamed({"prompt": _instruction(record, where), "completion": record["output"]}, record)
    return record


def media_in(record: Mapping[str, Any]) -> dict[str, str]:
    """Returns the kinds of media that a record has, each with the column, or the type of a part, that has it.

    Token ids are taken as they are, whatever stands beside them.
    """
    if record.get("input_ids") is not None:
        return {}
    turns = [turn for name in CHATS if isinstance(chat := record.get(name), list) for turn in chat]
    contents = [turn.get("content") for turn in turns if isinstance(turn, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, Mapping)]
    types = [str(part.get("type")) for part in parts]
    names = {
        kind: [
            *(name for name in (f"{kind}s", kind) if record.get(name) not in (None, [], "")),
            *(name for name in types if kind_of(name) == kind),
        ]
        for kind in KINDS
    }
    return {kind: own[0] for kind, own in names.items() if own}


def _refuse_images(record: Mapping[str, Any], where: Any) -> None:
    """Raises PackingError if a record has images, which would be left out without a word."""
    for name in media_in(record).values():
        raise PackingError(
            f"{where} has {name}, which this command does not read: use `crosspack train` with a --model that takes "
            "that, or crosspack.PackedMediaDataset, or leave that out"
        )


def _chat(messages: list[Any], record: Mapping[str, Any], where: Any) -> Mapping[str, Any]:
    """Returns a chat with the ``system`` and the ``tools`` of its record."""
    messages = _with_system(_messages(messages, where), record, where)
    return _Renamed({"messages": messages, "tools": tools_of(record, where)}, record)


def _prompted(record: Mapping[str, Any], where: Any) -> Mapping[str, Any]:
    """Returns a prompt and a completion; a prompt of messages begins with the ``system`` of the record."""
    if isinstance(record.get("label"), bool):
        raise PackingError(
            f"{where} has a label, true or false: `crosspack train --task kto` trains good and bad answers; name the "
            "columns of prompt and completion, to train all of them alike"
        )
    if not _beside(record):
        return record
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list):
        prompt = _with_system(prompt, record, where)
        return _Renamed({"prompt": prompt, "completion": completion, "tools": tools_of(record, where)}, record)
    if _system(record, where):
        raise PackingError(f"{where} has a system beside a prompt of text: write it into the prompt, or use messages")
    return record


def _beside(record: Mapping[str, Any]) -> bool:
    """Returns whether a record has something beside its messages that belongs to them."""
    return bool(record.get("system")) or isinstance(record.get("tools"), str)


def _with_system(messages: list[Any], record: Mapping[str, Any], where: Any) -> list[Any]:
    """Puts the column ``system`` of a record before its messages."""
    if not (system := _system(record, where)):
        return messages
    first = messages[0] if messages and isinstance(messages[0], Mapping) else {}
    if first.get("role") != "system":
        return [{"role": "system", "content": system}, *messages]
    if first.get("content") != system:
        raise PackingError(f"{where} has a system message and another text in its column system: keep one of them")
    return messages


def _system(record: Mapping[str, Any], where: Any) -> str:
    system = record.get("system")
    if system is not None and not isinstance(system, str):
        raise PackingError(f"{where}: system is a {type(system).__name__}, not a string")
    return system or ""


class _Renamed(dict[str, Any]):
    """A record under the names that are known here."""

    def __init__(self, named: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        super().__init__(named)
        self.as_read = record


def as_read(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the record that :func:`canonical` was given, with all of its columns under their own names."""
    return record.as_read if isinstance(record, _Renamed) else record


def _messages(conversation: list[Any], where: Any) -> list[Any]:
    """ShareGPT's ``from`` and ``value`` as ``role`` and ``content``, beside the turn's other keys.

    Messages that have a role already stay as they are.
    """
    messages = []
    for number, turn in enumerate(conversation):
        if isinstance(turn, Mapping) and "from" in turn and "value" in turn:
            speaker = str(turn["from"]).lower().replace("-", "_")
            if speaker in CALLS:
                said = _call(turn["value"], f"{where}: message {number}")
            elif speaker in ROLES:
                said = {"role": ROLES[speaker], "content": turn["value"]}
            else:
                known = ", ".join((*ROLES, *CALLS))
                raise PackingError(
                    f"{where}: message {number} is from {turn['from']!r}: rename the speaker to one of {known}"
                )
            messages.append({name: value for name, value in turn.items() if name not in ("from", "value")} | said)
        else:
            messages.append(turn)
    return messages


def check_roles(messages: list[Any], where: Any) -> None:
    """Raises PackingError if roles are named so that turns of the assistant would not be found, and not be trained."""
    roles = [message["role"] for message in messages]
    strange = [role for role in dict.fromkeys(map(str, roles)) if role not in SPOKEN]
    said = {role: ROLES.get(role.lower(), "assistant" if role.lower() in CALLS else "") for role in strange}
    if any(role in ("user", "assistant") for role in said.values()) or (strange and "assistant" not in roles):
        renames = ", ".join(f"{role!r} is {ours!r}" for role, ours in said.items() if ours)
        raise PackingError(
            f"{where}: messages have the roles {', '.join(map(repr, strange))}, and templates know {', '.join(SPOKEN)}"
            f": rename them{f' ({renames})' if renames else ''}, or write from and value as ShareGPT does"
        )


def _call(value: Any, where: str) -> dict[str, Any]:
    """The assistant's message that calls tools, of ``{"name": ..., "arguments": ...}`` or a list of them, in JSON."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise PackingError(f"{where} calls a tool by what is not JSON: {error}") from None
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise PackingError(f'{where} calls a tool: pass {{"name": ..., "arguments": {{...}}}}, or a list of them')
    functions = [{"name": call["name"], "arguments": arguments_of(call.get("arguments"))} for call in calls]
    made = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": "", "tool_calls": made}


def arguments_of(call: Any) -> Any:
    """Returns the arguments of a call as an object, which files also hold as JSON in a string."""
    if not isinstance(call, str):
        return {} if call is None else call
    try:
        return json.loads(call)
    except ValueError:
        return call


def _instruction(record: Mapping[str, Any], where: Any) -> str:
    """Writes the prompt of Stanford Alpaca: ``system`` replaces its first sentences, ``history`` follows them."""
    given = record.get("input")
    if given is not None and not isinstance(given, str):
        raise PackingError(f"{where}: input is a {type(given).__name__}, not a string")
    paired = ", paired with an input that provides further context" if given else ""
    system = _system(record, where) or (
        f"Below is an instruction that describes a task{paired}. Write a response that appropriately completes the "
        "request."
    )
    turns = "".join(f"{_asked(asked)}{answer}\n\n" for asked, answer in _history(record, where))
    return f"{system}\n\n{turns}{_asked(record['instruction'], given)}"


def _asked(instruction: str, given: str | None = None) -> str:
    """Writes an instruction, its input if it has one, and the header of the response."""
    context = f"### Input:\n{given}\n\n" if given else ""
    return f"### Instruction:\n{instruction}\n\n{context}### Response:\n"


def _history(record: Mapping[str, Any], where: Any) -> list[tuple[str, str]]:
    """Returns earlier instructions and responses."""
    turns = record.get("history") or []
    pairs = [tuple(turn) if isinstance(turn, list | tuple) else () for turn in turns] if isinstance(turns, list) else []
    texts = [pair for pair in pairs if len(pair) == 2 and all(isinstance(text, str) for text in pair)]
    if len(texts) != len(turns):
        raise PackingError(f"{where}: history is a list of [instruction, response] pairs of strings")
    return texts
