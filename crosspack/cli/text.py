"""Records to token ids and loss masks: columns, chat templates, BOS and EOS. Tokenisers are loaded or trained here.

A record has ``messages`` (a chat, written by the tokenizer's template), ``prompt`` + ``completion`` (text, or two
lists of messages), ``text``, or ``input_ids`` (``tokens``). Records come in, documents go out in the same order: token
ids and, for each, whether it is trained. Messages name the record's file and line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from crosspack.cli.chats import assistant_spans, in_spans
from crosspack.cli.tokens import COLUMNS as TOKEN_COLUMNS
from crosspack.cli.tokens import token_documents
from crosspack.reading.records import Record
from packing_core.errors import PackingError, first_line
from packing_core.extras import require
from packing_core.training.job import is_hub_name
from packing_core.training.schedule import Document

Loss = Literal["completion", "all"]

Located = tuple[str, Record]  # where a record stands, and the record

# What the tokenizer sees at once: so many records, or so many bytes. A token takes over a hundred bytes meanwhile.
_CHUNK, _CHUNK_BYTES = 1000, 1 << 20
COLUMNS = ("messages", "tools", "prompt", "completion", "text", *TOKEN_COLUMNS)  # what is read of a record
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # the tag with which a template marks what the assistant says

END, PAD = "<|endoftext|>", "<|pad|>"
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Policy:
    """What is added to a document and what of it is trained.

    Attributes:
        loss: ``completion`` trains completions and what the assistant says, ``all`` every token; ``text`` has no
            prompt, so all of it is trained either way.
        bos: put the BOS token first; None does what the tokenizer itself does. A chat template writes its own.
        eos: append the EOS token and train it; None does so if the tokenizer has one. A chat template writes its own.
    """

    loss: Loss = "completion"
    bos: bool | None = None
    eos: bool | None = None


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a local folder or a hub name, through ``AutoTokenizer``.

    Raises:
        PackingError: there is none, or it needs code of its own to run and ``trust_remote_code`` is False.
    """
    check_tokenizer(name)
    transformers = require("transformers", extra="hf")
    try:
        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # files of the folder may hold anything, and so may what reading them raises
        raise PackingError(f"tokenizer {name}: {first_line(error)}") from error


def check_tokenizer(name: str) -> None:
    """Raise PackingError if ``name`` is no folder and cannot be a hub name; nothing is loaded."""
    if "\0" in name or not (os.path.isdir(name) or is_hub_name(name)):
        raise PackingError(f"tokenizer {name}: no such folder, and not a hub name (`owner/name`)")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer of at most ``vocab_size`` entries, trained on ``texts``; the same for the same texts.

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
    bpe.train_from_iterator(texts, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=PAD)
    tokenizer.chat_template = _CHATML
    return tokenizer


def plain_texts(records: Iterable[Record]) -> Iterator[str]:
    """All text of the records, for training a tokenizer."""
    for where, record in _located(records):
        match kind_of(record, where):
            case "text":
                yield record["text"]
            case "completion":
                yield record["prompt"]
                yield record["completion"]
            case "input_ids":
                raise PackingError(f"{where} holds token ids: pass --tokenizer, the one they were made with")
            case _:
                for message in _chat(record, where)[0]:
                    yield _encodable(str(message.get("content") or ""), where)


class Encoder:
    """Turns records into documents with one tokenizer under one policy.

    Attributes:
        left_out: documents so far that have nothing to train on.
        on_left_out: called with the place and the tokens of each.
    """

    def __init__(self, tokenizer: Any, policy: Policy) -> None:
        self.tokenizer = tokenizer
        self.policy = policy
        self.left_out = 0
        self.on_left_out: Callable[[str, int], None] = lambda where, tokens: None
        probe = tokenizer("a")["input_ids"]
        adds_bos = tokenizer.bos_token_id is not None and probe[:1] == [tokenizer.bos_token_id]
        self._bos = self._special("bos", policy.bos, adds_bos)
        self._eos = self._special("eos", policy.eos, tokenizer.eos_token_id is not None)

    def _special(self, name: str, wanted: bool | None, default: bool) -> list[int]:
        if not (default if wanted is None else wanted):
            return []
        token: int | None = getattr(self.tokenizer, f"{name}_token_id")
        if token is None:
            raise PackingError(f"--{name} was given and the tokenizer has no {name.upper()} token: leave --{name} out")
        return [token]

    def describe(self) -> str:
        """The policy in one line, for the plan and the manifest."""
        bos, eos = (self.tokenizer.decode(ids) for ids in (self._bos, self._eos))
        trained = "all tokens" if self.policy.loss == "all" else "completions and assistant turns; plain text in full"
        return (
            f"BOS {bos or 'none'}, EOS {f'{eos} (trained)' if eos else 'none'}; chats as their template writes them; "
            f"loss on: {trained}"
        )

    def __call__(self, records: Iterable[Record]) -> Iterator[Document]:
        """Yield the documents of ``records`` in order; those without a trained token are left out and counted.

        Raises:
            PackingError: a record has none of the known columns, or the template cannot say what is trained.
        """
        return (document for _, document in self.located(records))

    def located(self, records: Iterable[Record]) -> Iterator[tuple[str, Document]]:
        """The same, each document with the place of its record."""
        for kind, chunk in _chunks(records):
            for where, document in self._by_kind[kind](self, chunk):
                if document.has_target:
                    yield where, document
                else:
                    self.left_out += 1
                    self.on_left_out(where, len(document.ids))

    def _texts(self, chunk: Sequence[Located]) -> Iterator[tuple[str, Document]]:
        texts = self._ids(record["text"] for _, record in chunk)
        for (where, _), ids in zip(chunk, texts, strict=True):
            whole = [*self._bos, *ids, *self._eos]
            yield where, _document(whole, np.ones(len(whole), np.bool_))

    def _completions(self, chunk: Sequence[Located]) -> Iterator[tuple[str, Document]]:
        """Prompt and completion are tokenised separately, as they are in generation, and joined as they are."""
        prompts = self._ids(record["prompt"] for _, record in chunk)
        completions = self._ids(record["completion"] for _, record in chunk)
        for (where, _), prompt, completion in zip(chunk, prompts, completions, strict=True):
            before, after = [*self._bos, *prompt], [*completion, *self._eos]
            trained = np.arange(len(before) + len(after)) >= (0 if self.policy.loss == "all" else len(before))
            yield where, _document([*before, *after], trained)

    def _chats(self, chunk: Sequence[Located]) -> Iterator[tuple[str, Document]]:
        for where, record in chunk:
            messages, first_trained = _chat(record, where)
            if not messages:
                yield where, _document([], np.zeros(0, np.bool_))
                continue
            try:
                yield where, self._chat_document(messages, first_trained, record.get("tools") or None)
            except PackingError as error:
                raise PackingError(f"{where}: {error}") from None
            except Exception as error:  # a template is a program of the model's author and may raise anything
                raise PackingError(f"{where}: the chat template refused it: {first_line(error)}") from error

    def _chat_document(self, messages: list[Any], first_trained: int, tools: Any) -> Document:
        if self.tokenizer.chat_template is None:
            raise PackingError("the tokenizer has no chat template: pass --tokenizer of a chat model")
        template = self.tokenizer.get_chat_template(tools=tools)
        everything = self.policy.loss == "all"
        if _GENERATION.search(template) and not first_trained and not everything:
            encoded = self.tokenizer.apply_chat_template(messages, tools=tools, return_assistant_tokens_mask=True)
            return _document(encoded["input_ids"], np.array(encoded["assistant_masks"], np.bool_))

        def write(messages: Sequence[Any], *, ask: bool = False) -> str:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=ask
            )
            return text

        if everything:
            ids = self._ids([write(messages)])[0]
            return _document(ids, np.ones(len(ids), np.bool_))
        chat, spans = assistant_spans(write, messages, first_trained)
        encoded = self.tokenizer(chat, add_special_tokens=False, return_offsets_mapping=True)
        starts = np.array([begin for begin, _ in encoded["offset_mapping"]], np.int64)
        return _document(encoded["input_ids"], in_spans(starts, spans))

    def _tokens(self, chunk: Sequence[Located]) -> Iterator[tuple[str, Document]]:
        return ((where, document) for where, record in chunk for document in token_documents(record, where))

    def _ids(self, texts: Iterable[str]) -> list[list[int]]:
        ids: list[list[int]] = self.tokenizer(
            list(texts), add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False
        )["input_ids"]
        return ids

    _by_kind: ClassVar[dict[str, Callable[[Encoder, Sequence[Located]], Iterator[tuple[str, Document]]]]] = {
        "messages": _chats,
        "completion": _completions,
        "text": _texts,
        "input_ids": _tokens,
    }


def _document(ids: Any, trained: NDArray[np.bool_]) -> Document:
    return Document(np.asarray(ids, np.int32), trained)


def _located(records: Iterable[Record]) -> Iterator[Located]:
    return ((getattr(record, "where", f"record {number}"), record) for number, record in enumerate(records))


def _chunks(records: Iterable[Record]) -> Iterator[tuple[str, list[Located]]]:
    """Records in order by runs of one kind, so that the tokenizer works on many texts, but not too many, at once."""
    chunk: list[Located] = []
    kind, size = "", 0
    for where, record in _located(records):
        own = kind_of(record, where)
        if chunk and (own != kind or len(chunk) == _CHUNK or size >= _CHUNK_BYTES):
            yield kind, chunk
            chunk, size = [], 0
        kind, size = own, size + _size(record)
        chunk.append((where, record))
    if chunk:
        yield kind, chunk


def _size(value: Any) -> int:
    """Bytes that a value takes, roughly."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    if isinstance(value, list) and not (value and isinstance(value[0], int)):
        return sum(map(_size, value))
    return 8 * len(value) if hasattr(value, "__len__") else 8


def kind_of(record: Record, where: str) -> str:
    """Which of the known columns the record has; the first that is there wins. Its texts are strings."""
    if record.get("input_ids") is not None:
        return "input_ids"
    if record.get("messages") is not None:
        return "messages"
    if record.get("prompt") is not None and record.get("completion") is not None:
        kinds = {type(record["prompt"]), type(record["completion"])}
        if kinds == {list}:
            return "messages"
        if kinds != {str}:
            found = " and ".join(f"{name} is a {type(record[name]).__name__}" for name in ("prompt", "completion"))
            raise PackingError(f"{where}: {found}: both must be strings, or both lists of messages")
        for name in ("prompt", "completion"):
            _encodable(record[name], where)
        return "completion"
    if record.get("text") is not None:
        if not isinstance(record["text"], str):
            raise PackingError(f"{where}: text is a {type(record['text']).__name__}, not a string")
        _encodable(record["text"], where)
        return "text"
    raise PackingError(
        f"{where} has the columns {', '.join(map(str, record)) or 'none'}: a record needs text, prompt + completion, "
        f"messages or input_ids, and none of them null"
    )


def _encodable(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PackingError(f"{where}: {first_line(error)}: the text is not valid Unicode, repair it") from None
    return text


def _chat(record: Record, where: str) -> tuple[list[Any], int]:
    """The messages of a record and the number of the first one whose assistant turns are trained."""
    given = record.get("messages")
    prompt = [] if given is not None else record["prompt"]
    messages = [*prompt, *record["completion"]] if given is None else given
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise PackingError(f"{where}: messages is a list of objects with role and content")
    return messages, len(prompt)
