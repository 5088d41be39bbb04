"""Chats of every shape, by all templates that TRL ships, through every kind of tokenizer: what of them is trained.

Every text, key and name of a chat is made of words of its own, so that the trained tokens, decoded, say whose they are.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from crosspack.encoding.text import Encoder, Policy
from crosspack.encoding.tokenizer import CHATML
from packing_core.errors import PackingError
from tests.cli.tokenizer_kinds import KINDS, tokenizer_of

trl: Any = pytest.importorskip("trl", reason="the templates are TRL's")
_FOLDER = Path(trl.__file__).parent / "chat_templates"
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(_FOLDER.glob("*.jinja"))} | {"ours": CHATML}
DRAW = random.Random(7)
WORDS = sorted({"".join(map(DRAW.choice, ("zxqk", "ou", "vwzb", "ai", "gkp", "u", "x"))) for _ in range(90)})
SHAPES = ("plain", "reasoning", "calls", "assistant first", "side by side", "weights")
MARKS = ({"weight": 0}, {"train": False}, {"loss": 0})
# which write texts in lists of parts alone, and leave out or refuse a plain one
OF_PARTS = {"idefics3", "llava_next", "smolvlm"}
# which end the last turn of a chat otherwise than those before it
ENDS_ONCE = {"phi3", "phi3_5"}
JOINING = ("diffusion", "gemma4")  # turns that stand side by side are written as one


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    texts = [*WORDS * 3, *(" ".join(WORDS[n : n + 9]) for n in range(len(WORDS))), TEMPLATES["qwen3"]]
    return {kind: tokenizer_of(kind, texts) for kind in KINDS}


def chat_of(shape: str, seed: int) -> list[dict[str, Any]]:
    draw = random.Random(f"{shape} {seed}")
    words = iter(draw.sample(WORDS, len(WORDS)))

    def says() -> str:
        return draw.choice(["", "\n", " "]) + f"{next(words)} {next(words)}" + draw.choice(["", " ", "\n"])

    def answers() -> dict[str, Any]:
        return {"role": "assistant", "content": says()}

    messages = [{"role": "system", "content": says()}] if draw.random() < 0.3 else []
    messages += [answers()] if shape == "assistant first" else []
    for _ in range(draw.randint(1, 3)):
        messages.append({"role": "user", "content": says()})
        answer = answers()
        if shape == "reasoning":
            answer["reasoning_content"] = next(words)
        if shape == "calls":
            arguments = {next(words): says().strip(), next(words): {next(words): [next(words)]}}
            call = {"type": "function", "function": {"name": next(words), "arguments": arguments}}
            text = draw.choice([answer["content"], ""])
            messages += [answer | {"content": text, "tool_calls": [call]}, {"role": "tool", "content": says()}]
            answer = answers()
        if shape == "weights":
            answer |= draw.choice(({}, *MARKS))
        messages.append(answer)
        if shape == "side by side":
            messages.append(answers())
    return messages


def words_of(value: Any) -> set[str]:
    return {word for word in WORDS if word in str(value)}


def check(name: str, tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    """Checks what is trained of a chat; returns why it is refused, or an empty text."""
    trained, others = set[str](), set[str]()
    for message in messages:
        says = message["role"] == "assistant" and not any(mark.items() <= message.items() for mark in MARKS)
        (trained if says else others).update(words_of(message))
    try:
        documents = list(Encoder(tokenizer, Policy())([{"messages": messages}]))
    except PackingError as error:
        return str(error)
    if not documents:
        assert not trained
        return ""
    ((ids, marks, *_),) = documents
    assert ids.tolist() == tokenizer.apply_chat_template(messages)["input_ids"]
    said = "".join(tokenizer.decode(ids[marks]).split()).replace("##", "").lower()
    assert {word for word in trained | others if word in said} == trained, (name, messages)
    return ""


@pytest.mark.parametrize("shape", SHAPES)
def test_what_the_assistant_says_is_trained_and_nothing_else_or_the_chat_is_refused(tokenizers, shape):
    refused = Counter[str]()
    for number, (name, template) in enumerate(TEMPLATES.items()):
        tokenizer = tokenizers[list(KINDS)[number % len(KINDS)]]
        tokenizer.chat_template = template
        refused[name] = sum(bool(check(name, tokenizer, chat_of(shape, seed))) for seed in range(2))
    served = [name for name, times in refused.items() if times < 2]
    assert len(served) > len(TEMPLATES) / 9  # most templates write no reasoning, or drop that of earlier turns


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_chats_by_all_templates_hold_it_for_each_kind_of_tokenizer(tokenizers, kind):
    tokenizer = tokenizers[kind]
    for name, template in TEMPLATES.items():
        tokenizer.chat_template = template
        for shape in SHAPES:
            for seed in range(2):
                check(name, tokenizer, chat_of(shape, seed))


@pytest.mark.parametrize("shape", ["plain", "assistant first", "side by side", "weights"])
def test_templates_serve_all_chats_that_they_write(tokenizers, shape):
    tokenizer = tokenizers["WordPiece"]
    for name, template in TEMPLATES.items():
        if name in ENDS_ONCE or name.removesuffix("_training") in OF_PARTS:
            continue
        tokenizer.chat_template = template
        for seed in range(2):
            messages = chat_of(shape, seed)
            try:
                tokenizer.apply_chat_template(messages, tokenize=False)
            except Exception:  # a template is a program and may raise anything
                continue
            if not (name.startswith(JOINING) and shape == "side by side"):
                assert not check(name, tokenizer, messages)


def test_turns_that_are_found_by_their_headers_end_where_generation_blocks_end(tokenizers):
    """A block may hold the header too, or the beginning of a reasoning that the header asks for."""
    tokenizer, compared = tokenizers["byte-level BPE"], 0
    for name, template in TEMPLATES.items():
        twin = TEMPLATES.get(f"{name}_training", "")
        for shape in ("plain", "assistant first", "side by side") if "endgeneration" in twin else ():
            messages, documents = chat_of(shape, 1), []
            for tokenizer.chat_template in (template, twin):
                with suppress(PackingError):
                    documents += Encoder(tokenizer, Policy())([{"messages": messages}])
            if len(documents) < 2 or documents[0][0].tolist() != documents[1][0].tolist():
                continue  # one of them refuses the chat, or writes it otherwise
            (_, found, *_), (_, marked, *_) = documents
            assert not (found & ~marked).any()
            assert not ((found != marked)[:-1] & ~marked[1:]).any(), name  # what is left out is the beginning of a turn
            compared += 1
    assert compared > 40
