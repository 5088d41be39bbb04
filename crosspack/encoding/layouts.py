"""Layouts of records that others made common: ShareGPT's conversations, Alpaca's instructions, columns by any name.

A record goes in; one with the columns that the encoder knows comes out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packing_core.errors import PackingError

COLUMNS = ("conversations", "instruction", "input", "output")
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
}
_KNOWN = ("input_ids", "messages", "prompt", "text")  # a record with one of these is taken as it is


def canonical(record: Mapping[str, Any], where: Any, fields: tuple[tuple[str, str], ...]) -> Mapping[str, Any]:
    """The record with the columns ``text``, ``prompt`` and ``completion``, ``messages`` or ``input_ids``.

    Args:
        record: as the file has it.
        where: its place, for errors.
        fields: (name, column) pairs: ``(("text", "body"),)`` takes the column ``body`` for the text. With any, no other
            layout is looked for.

    Raises:
        PackingError: it has not the columns of ``fields``, or a conversation is not as ShareGPT writes it.
    """
    if fields:
        missing = [column for _, column in fields if record.get(column) is None]
        if missing:
            raise PackingError(f"{where} has no {missing[0]}, only {', '.join(map(str, record)) or 'no column'}")
        named = {name: record[column] for name, column in fields}
        if isinstance(found := named.get("messages"), list):
            named["messages"] = _messages(found, where)
        return _Renamed(named, record)
    if any(record.get(name) is not None for name in _KNOWN):
        return record
    if isinstance(conversation := record.get("conversations"), list):
        return _Renamed({"messages": _messages(conversation, where), "tools": record.get("tools")}, record)
    if isinstance(record.get("instruction"), str) and isinstance(record.get("output"), str):
        return _Renamed({"prompt": _instruction(record, where), "completion": record["output"]}, record)
    return record


class _Renamed(dict[str, Any]):
    """A record under the names that are known here; ``get`` finds its other columns too."""

    def __init__(self, named: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        super().__init__(named)
        self._record = record

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default if name in _ALL else self._record.get(name, default)


_ALL = frozenset([*_KNOWN, "completion", "tools"])


def _messages(conversation: list[Any], where: Any) -> list[Any]:
    """ShareGPT's ``from`` and ``value`` as ``role`` and ``content``; what has a role already stays."""
    messages = []
    for number, turn in enumerate(conversation):
        if isinstance(turn, Mapping) and "from" in turn and "value" in turn:
            role = ROLES.get(str(turn["from"]).lower())
            if role is None:
                known = ", ".join(ROLES)
                raise PackingError(
                    f"{where}: message {number} is from {turn['from']!r}: rename the speaker to one of {known}"
                )
            messages.append({"role": role, "content": turn["value"]})
        else:
            messages.append(turn)
    return messages


def _instruction(record: Mapping[str, Any], where: Any) -> str:
    """The prompt that Stanford Alpaca trains with."""
    given = record.get("input")
    if given is not None and not isinstance(given, str):
        raise PackingError(f"{where}: input is a {type(given).__name__}, not a string")
    told = "Below is an instruction that describes a task"
    if given:
        return (
            f"{told}, paired with an input that provides further context. Write a response that appropriately "
            f"completes the request.\n\n### Instruction:\n{record['instruction']}\n\n"
            f"### Input:\n{given}\n\n### Response:\n"
        )
    return (
        f"{told}. Write a response that appropriately completes the request.\n\n"
        f"### Instruction:\n{record['instruction']}\n\n### Response:\n"
    )
