"""Records to token ids and loss masks: columns, chat templates, BOS and EOS.

A record has ``messages`` (a chat, written by the tokenizer's template), ``prompt`` + ``completion`` (text, or two
lists of messages), ``text``, or ``input_ids`` (``tokens``). Records come in, documents go out in the same order: token
ids and, for each, whether it is trained. Messages name the record's file and line.
"""

from __future__ import annotations

import itertools
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crosspack.encoding.chats import Span, in_spans, lost_field, spans_of_turns, squeezed
from crosspack.encoding.kinds import (
    Located,
    Refuse,
    Where,
    bad_record,
    chunks,
    encodable,
    kind_of,
    located,
    raise_error,
)
from crosspack.encoding.layouts import COLUMNS as LAYOUT_COLUMNS
from crosspack.encoding.layouts import as_read, canonical, check_roles
from crosspack.encoding.limits import check_written, limited
from crosspack.encoding.long_texts import FACTOR, LongTexts
from crosspack.encoding.tokenizer import entries, panics_as_errors, rust_tokenizer
from crosspack.encoding.tokens import COLUMNS as TOKEN_COLUMNS
from crosspack.encoding.tokens import check_entries, token_documents
from crosspack.reading.records import Record
from packing_core.batches.media import as_turn
from packing_core.errors import MissingExtraError, PackingError, first_line, naming
from packing_core.training.schedule import EncodedDocument

Loss = Literal["completion", "all"]


class Encoded(NamedTuple):
    """A document, the record that it comes from, as it was read, and other columns that have a value for each token."""

    where: Where
    record: Record
    document: EncodedDocument
    columns: dict[str, NDArray[Any]]


# what is read of a record
COLUMNS = ("messages", "tools", "prompt", "completion", "text", *LAYOUT_COLUMNS, *TOKEN_COLUMNS)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # the tag with which a template marks what the assistant says


@dataclass(frozen=True)
class Policy:
    """Rules for the tokens added to a document and the tokens trained.

    Attributes:
        loss: ``completion`` trains completions and what the assistant says, ``all`` every token; ``text`` has no
            prompt, so all of it is trained either way.
        bos: put the BOS token first; None does what the tokenizer itself does. A chat template writes its own.
        eos: append the EOS token and train it; None does so if the tokenizer has one. A chat template writes its own.
        fields: (name, column) pairs: which column of the data is what is called ``text``, ``prompt``, ``completion``,
            ``messages`` or ``input_ids`` here. With any, the records' other columns do not count, but for labels and
            marks beside token ids.
    """

    loss: Loss = "completion"
    bos: bool | None = None
    eos: bool | None = None
    fields: tuple[tuple[str, str], ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that may be read of a record."""
        if not self.fields:
            return COLUMNS
        beside = TOKEN_COLUMNS if "input_ids" in dict(self.fields) else ()
        return (*(column for _, column in self.fields), *beside)


def plain_texts(records: Iterable[Record], fields: tuple[tuple[str, str], ...] = ()) -> Iterator[str]:
    """All text of the records, for training a tokenizer."""
    for where, given in located(records):
        record = canonical(given, where, fields)
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
                    yield encodable(str(message.get("content") or ""), where)


class Encoder:
    """Turns records into documents with one tokenizer under one policy.

    A pickled encoder loads the tokenizer of transformers when it needs it, for chats; texts need the library
    ``tokenizers`` alone, which a process imports in a tenth of the time.

    Attributes:
        left_out: documents so far that have nothing to train on.
        entries: of the tokenizer: one more than its largest token id.
        carried: columns beside the tokens of tokenised records, a number for each, that documents keep.
    """

    def __init__(self, tokenizer: Any, policy: Policy) -> None:
        self._tokenizer = tokenizer
        self._pickled = b""  # of the tokenizer, in an encoder that was pickled and has not needed it
        self.policy = policy
        self.left_out = 0
        self.carried: tuple[str, ...] = ()
        probe = tokenizer("a")["input_ids"]
        adds_bos = tokenizer.bos_token_id is not None and probe[:1] == [tokenizer.bos_token_id]
        self._bos = self._special("bos", policy.bos, adds_bos)
        self._eos = self._special("eos", policy.eos, tokenizer.eos_token_id is not None)
        self._rust = rust_tokenizer(tokenizer)
        self._long_texts = LongTexts(self._rust)
        self.entries = entries(tokenizer)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, as transformers has it."""
        if self._tokenizer is None:
            self._tokenizer = pickle.loads(self._pickled)
        return self._tokenizer

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_tokenizer": None, "_pickled": pickle.dumps(self.tokenizer)}

    def _special(self, name: str, wanted: bool | None, default: bool) -> NDArray[np.int32]:
        if not (default if wanted is None else wanted):
            return np.zeros(0, np.int32)
        token: int | None = getattr(self.tokenizer, f"{name}_token_id")
        if token is None:
            raise PackingError(f"--{name} was given and the tokenizer has no {name.upper()} token: leave --{name} out")
        return np.array([token], np.int32)

    def describe(self) -> str:
        """The policy in one line, for the plan and the manifest."""
        bos, eos = (self.tokenizer.decode(ids.tolist()) for ids in (self._bos, self._eos))
        trained = "all tokens" if self.policy.loss == "all" else "completions and assistant turns; plain text in full"
        return (
            f"BOS {bos or 'none'}, EOS {f'{eos} (trained)' if eos else 'none'}; chats as their template writes them; "
            f"loss on: {trained}"
        )

    def __call__(self, records: Iterable[Record]) -> Iterator[EncodedDocument]:
        """Yield the documents of ``records`` in order; those without a trained token are left out and counted.

        Raises:
            PackingError: a record has none of the known columns, or the template cannot say what is trained.
            MissingExtraError: there is a chat, and what runs chat templates (jinja2) is not installed.
        """
        return (found.document for found in self.encoded(records))

    def encoded(
        self,
        records: Iterable[Record],
        refuse: Refuse = raise_error,
        left_out: Callable[[Where, int], None] | None = None,
    ) -> Iterator[Encoded]:
        """The same, each document with its record and the columns that were read beside its tokens.

        Args:
            refuse: is called with each record that cannot be encoded, and the error; raises it by default. A missing
                library is no record's fault and is raised in any case.
            left_out: is called with the place and the tokens of each document without a trained token.
        """
        for kind, chunk in chunks(records, refuse, self.policy.fields):
            for found in self._by_kind[kind](self, chunk, refuse):
                if found.document.has_target:
                    yield found
                else:
                    self.left_out += 1
                    if left_out is not None:
                        left_out(found.where, len(found.document.ids))

    def prompt(self, text: str, *, chat: bool) -> tuple[int, ...]:
        """The token ids of a prompt that a model continues: a user's message if it is trained on chats.

        Raises:
            PackingError: the chat template refuses it.
        """
        if chat:
            message = {"role": "user", "content": text}
            with naming(f"the chat template refused {text!r}"):  # which is a program of the model's author
                text = self.tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        (ids,) = self._ids([text])
        return tuple((ids if chat else np.concatenate([self._bos, ids])).tolist())

    def limit(self, max_record: int) -> None:
        """Bounds what goes through the tokenizer at once by the bytes that a record may take."""
        self._long_texts.longest = max_record // FACTOR

    def _tokenized(
        self, chunk: Sequence[Located], names: Sequence[str], refuse: Refuse
    ) -> Iterator[tuple[Where, Record, list[NDArray[np.int32]]]]:
        """The records with the ids of their texts of these names; those that the tokenizer cannot take are refused."""
        try:
            columns = [self._ids([record[name] for _, record in chunk]) for name in names]
        except PackingError as error:
            if len(chunk) == 1:
                ((where, record),) = chunk
                refuse(bad_record(where, record, error), error.reworded(f"{where}: {error}"))
            else:  # one by one, to find those that it cannot
                for each in chunk:
                    yield from self._tokenized([each], names, refuse)
            return
        for (where, record), *ids in zip(chunk, *columns, strict=True):
            yield where, record, ids

    def _texts(self, chunk: Sequence[Located], refuse: Refuse, names: Sequence[str] = ("text",)) -> Iterator[Encoded]:
        """Prompt and completion are tokenised separately, as they are in generation, and joined as they are."""
        for where, record, parts in self._tokenized(chunk, names, refuse):
            whole = np.concatenate([self._bos, *parts, self._eos], dtype=np.int32)
            trained = np.ones(len(whole), np.bool_)
            if self.policy.loss != "all" and len(parts) > 1:
                trained[: len(self._bos) + len(parts[0])] = False
            yield Encoded(where, as_read(record), EncodedDocument(whole, trained), {})

    def _chats(self, chunk: Sequence[Located], refuse: Refuse) -> Iterator[Encoded]:
        for where, record in chunk:
            try:
                document = self._chat(where, record)
            except MissingExtraError:
                raise  # no record is at fault, and none of the others can be written either
            except PackingError as error:
                refuse(bad_record(where, record, error), error)
            else:
                yield Encoded(where, as_read(record), document, {})

    def _chat(self, where: Where, record: Record) -> EncodedDocument:
        messages, first_trained = _chat(record, where)
        if not messages:
            return _document([], np.zeros(0, np.bool_))
        try:
            with limited(), panics_as_errors():
                return self._chat_document(messages, first_trained, record.get("tools") or None)
        except PackingError as error:
            raise PackingError(f"{where}: {error}") from None
        except ImportError as error:  # transformers lacks jinja2 or finds an old one, and says what to install
            raise MissingExtraError(f"chat templates cannot run here: {first_line(error)}") from error
        except Exception as error:  # a template is a program of the model's author and may raise anything
            raise PackingError(f"{where}: the chat template refused it: {first_line(error)}") from error

    def _chat_document(self, messages: list[Any], first_trained: int, tools: Any) -> EncodedDocument:
        if self.tokenizer.chat_template is None:
            raise PackingError("the tokenizer has no chat template: pass --tokenizer of a chat model")
        everything = self.policy.loss == "all"
        if not everything and not self.tokenizer.is_fast:
            raise PackingError(
                f"the tokenizer is a {type(self.tokenizer).__name__}, which does not say where its tokens stand in a "
                "text, so what the assistant says cannot be marked: pass --loss all, or a folder with a tokenizer.json"
            )
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]

        def write(messages: Sequence[Any], *, ask: bool = False) -> str:
            return check_written(
                self.tokenizer.apply_chat_template(
                    list(messages), tools=tools, tokenize=False, add_generation_prompt=ask
                )
            )

        wanted = [trains(message, number) for number, message in enumerate(messages)]
        if everything:
            if not all(wanted):
                raise PackingError(
                    f"message {wanted.index(False)} says that it is not trained, and --loss all trains every token: "
                    "leave one of them out"
                )
            chat = write(messages)
            self._check_fields(enumerate(messages), itertools.repeat(squeezed(chat)))
            (ids,) = self._ids([chat])
            return _document(ids, np.ones(len(ids), np.bool_))
        template = self.tokenizer.get_chat_template(tools=tools)
        if _GENERATION.search(template):
            chat, blocks = self._marked(messages, tools, template)
        else:
            chat, blocks = write(messages), None
        wanted[:first_trained] = [False] * first_trained
        turns = spans_of_turns(write, messages, wanted, chat, blocks)
        texts = (squeezed("\0".join(chat[begin:end] for begin, end in spans)) for spans in turns.values())
        self._check_fields(((turn, messages[turn]) for turn in turns), texts)
        ids, begins, ends = self._ids_and_places(chat)
        return _document(ids, in_spans(chat, begins, ends, [span for spans in turns.values() for span in spans]))

    def _marked(self, messages: list[Any], tools: Any, template: str) -> tuple[str, list[Span]]:
        """The chat and the characters of the ``{% generation %}`` blocks in it, as apply_chat_template finds them."""
        from transformers.utils.chat_template_utils import render_jinja_template

        options = {"tools": tools, "chat_template": template, **self.tokenizer.special_tokens_map}
        rendered: Any = render_jinja_template([messages], return_assistant_tokens_mask=True, **options)
        (chat,), (blocks,) = rendered
        return check_written(chat), blocks

    def _check_fields(self, messages: Iterable[tuple[int, Any]], texts: Iterable[str]) -> None:
        """Raises PackingError if a message says something that is not in its text, which would be lost."""
        for (number, message), text in zip(messages, texts, strict=False):
            if (field := lost_field(text, message)) is not None:
                name = self.tokenizer.name_or_path
                raise PackingError(
                    f"the chat template{f' of {name}' if name else ''} does not write {field} in message {number}, so "
                    "it would be lost: pass a --tokenizer whose template writes it, or take it out of the record"
                    + (', or give the message "train": false' if self.policy.loss != "all" else "")
                )

    def _ids_and_places(self, chat: str) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
        """The token ids of a text, and where each token begins and ends in it."""
        ids, places, at = [], [], 0
        for piece in self._long_texts.pieces(chat):
            encoded = self.tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True)
            ids.append(np.array(encoded["input_ids"], np.int32))
            places.append(at + np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2))
            at += len(piece)
        begins, ends = np.concatenate(places).T
        return np.concatenate(ids), begins, ends

    def _tokens(self, chunk: Sequence[Located], refuse: Refuse) -> Iterator[Encoded]:
        for where, record in chunk:
            try:
                carried = {name: as_read(record).get(name) for name in self.carried}
                documents = list(token_documents(record, str(where), carried))
                check_entries(str(where), (document for document, _ in documents), self.entries)
            except PackingError as error:
                refuse(bad_record(where, record, error), error)
            else:
                yield from (Encoded(where, as_read(record), document, columns) for document, columns in documents)

    def _ids(self, texts: list[str]) -> list[NDArray[np.int32]]:
        pieces = [self._long_texts.pieces(text) for text in texts]
        with panics_as_errors():
            if any(len(each) > 1 for each in pieces):  # one at a time: that is what they were cut for
                return [np.concatenate([self._ids_of([piece])[0] for piece in each]) for each in pieces]
            return self._ids_of(texts)

    def _ids_of(self, texts: list[str]) -> list[NDArray[np.int32]]:
        if self._rust is not None:
            encodings = self._rust.encode_batch_fast(texts, add_special_tokens=False)
            return [np.fromiter(encoding.ids, np.int32, len(encoding)) for encoding in encodings]
        ids = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False)[
            "input_ids"
        ]
        return [np.array(one, np.int32) for one in ids]

    _by_kind: ClassVar[dict[str, Callable[[Encoder, Sequence[Located], Refuse], Iterator[Encoded]]]] = {
        "messages": _chats,
        "completion": partial(_texts, names=("prompt", "completion")),
        "text": _texts,
        "input_ids": _tokens,
    }


def _document(ids: Any, trained: NDArray[np.bool_]) -> EncodedDocument:
    return EncodedDocument(np.asarray(ids, np.int32), trained)


def trains(message: Any, number: int) -> bool:
    """Returns whether a message is trained if it is the assistant's: ``weight``, ``train`` and ``loss`` may say no."""
    marks = {name: message[name] for name in ("weight", "train", "loss") if message.get(name) is not None}
    for name, value in marks.items():
        if message["role"] == "assistant" and not (isinstance(value, bool | int | float) and value in (0, 1)):
            raise PackingError(
                f"message {number} has the {name} {value!r}: 0 leaves it untrained, 1 trains it, as false and true do"
            )
    return all(marks.values())


def _chat(record: Record, where: Where) -> tuple[list[Any], int]:
    """The messages of a record and the number of the first one whose assistant turns are trained."""
    given = record.get("messages")
    prompt = [] if given is not None else record["prompt"]
    messages = [*prompt, *record["completion"]] if given is None else given
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise PackingError(f"{where}: messages is a list of objects with role and content")
    check_roles(messages, where)
    return [as_turn(message) for message in messages], len(prompt)
