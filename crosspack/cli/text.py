"""Records to token ids and loss masks: columns, chat templates, BOS and EOS. Tokenisers are loaded or trained here.

A record has ``messages`` (a chat, written by the tokenizer's template), ``prompt`` + ``completion`` (text, or two lists
of messages), ``text``, or ``input_ids`` (what ``crosspack pack`` wrote). Records come in, documents go out in the same
order: token ids and, for each, whether it is trained.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from crosspack.cli.records import Record
from packing_core.errors import PackingError, first_line
from packing_core.extras import require
from packing_core.training.job import is_hub_name
from packing_core.training.schedule import Document

Loss = Literal["completion", "all"]

_CHUNK = 1000  # records that the tokenizer sees at once
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
    transformers = require("transformers", extra="hf")
    if not Path(name).is_dir() and not is_hub_name(name):
        raise PackingError(f"tokenizer {name}: no such folder, and not a hub name (`owner/name`)")
    try:
        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise PackingError(f"tokenizer {name}: {first_line(error)}") from error


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
    for number, record in enumerate(records):
        match _kind(record, number):
            case "text":
                yield record["text"]
            case "completion" if isinstance(record["prompt"], str):
                yield record["prompt"]
                yield record["completion"]
            case "input_ids":
                raise PackingError(
                    f"record {number} holds token ids: pass --tokenizer or --model, the one they were made with"
                )
            case _:
                for message in _chat(record, number)[0]:
                    yield str(message.get("content") or "")


class Encoder:
    """Turns records into documents with one tokenizer under one policy.

    Attributes:
        left_out: records so far that gave nothing to train on, and therefore no document.
    """

    def __init__(self, tokenizer: Any, policy: Policy) -> None:
        self.tokenizer = tokenizer
        self.policy = policy
        self.left_out = 0
        probe = tokenizer("a")["input_ids"]
        adds_bos = tokenizer.bos_token_id is not None and probe[0] == tokenizer.bos_token_id
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
        trained = "all tokens" if self.policy.loss == "all" else "completions and assistant turns; text whole"
        return (
            f"BOS {bos or 'none'}, EOS {f'{eos} (trained)' if eos else 'none'}; chats as their template writes them; "
            f"trained: {trained}"
        )

    def __call__(self, records: Iterable[Record]) -> Iterator[Document]:
        """Yield the documents of ``records`` in order; a record without a trained token yields none and is counted.

        Raises:
            PackingError: a record has none of the known columns, or the template cannot say what is trained.
        """
        numbered = enumerate(records)
        while chunk := list(islice(numbered, _CHUNK)):
            for document in self._encode(chunk):
                if document.has_target:
                    yield document
                else:
                    self.left_out += 1

    def _encode(self, chunk: Sequence[tuple[int, Record]]) -> Iterator[Document]:
        """Encode records by runs of one kind, so that the tokenizer works on many texts at once."""
        begin = 0
        kinds = [_kind(record, number) for number, record in chunk]
        for end in range(1, len(chunk) + 1):
            if end == len(chunk) or kinds[end] != kinds[begin]:
                yield from self._by_kind[kinds[begin]](self, chunk[begin:end])
                begin = end

    def _texts(self, chunk: Sequence[tuple[int, Record]]) -> Iterator[Document]:
        for ids in self._ids(record["text"] for _, record in chunk):
            whole = [*self._bos, *ids, *self._eos]
            yield _document(whole, np.ones(len(whole), np.bool_))

    def _completions(self, chunk: Sequence[tuple[int, Record]]) -> Iterator[Document]:
        """Prompt and completion are tokenised apart, as they are when the model is asked, and joined as they are."""
        if any(not isinstance(record["prompt"], str) for _, record in chunk):
            yield from self._chats(chunk)
            return
        prompts = self._ids(record["prompt"] for _, record in chunk)
        completions = self._ids(record["completion"] for _, record in chunk)
        for prompt, completion in zip(prompts, completions, strict=True):
            before, after = [*self._bos, *prompt], [*completion, *self._eos]
            trained = np.arange(len(before) + len(after)) >= (0 if self.policy.loss == "all" else len(before))
            yield _document([*before, *after], trained)

    def _chats(self, chunk: Sequence[tuple[int, Record]]) -> Iterator[Document]:
        for number, record in chunk:
            messages, first_trained = _chat(record, number)
            try:
                yield self._chat_document(messages, first_trained, record.get("tools") or None)
            except PackingError as error:
                raise PackingError(f"record {number}: {error}") from None
            except Exception as error:  # a template is a program of the model's author and may raise anything
                raise PackingError(f"record {number}: the chat template refused it: {first_line(error)}") from error

    def _chat_document(self, messages: list[Any], first_trained: int, tools: Any) -> Document:
        if self.tokenizer.chat_template is None:
            raise PackingError("the tokenizer has no chat template: pass --tokenizer of a chat model")
        template = self.tokenizer.get_chat_template(tools=tools)
        everything = self.policy.loss == "all"
        if _GENERATION.search(template) and not first_trained and not everything:
            encoded = self.tokenizer.apply_chat_template(messages, tools=tools, return_assistant_tokens_mask=True)
            return _document(encoded["input_ids"], np.array(encoded["assistant_masks"], np.bool_))

        def written(count: int, *, ask: bool = False) -> str:
            text: str = self.tokenizer.apply_chat_template(
                messages[:count], tools=tools, tokenize=False, add_generation_prompt=ask
            )
            return text

        chat = written(len(messages))
        encoded = self.tokenizer(chat, add_special_tokens=False, return_offsets_mapping=not everything)
        if everything:
            return _document(encoded["input_ids"], np.ones(len(encoded["input_ids"]), np.bool_))
        starts = np.array([begin for begin, _ in encoded["offset_mapping"]], np.int64)
        trained = np.zeros(len(starts), np.bool_)
        for turn in range(first_trained, len(messages)):
            if messages[turn]["role"] != "assistant":
                continue
            before, after = written(turn, ask=True), written(turn + 1)
            if not chat.startswith(after) or not after.startswith(before):
                raise PackingError(
                    f"the chat template writes message {turn} differently when more follow, so what the assistant says "
                    f"cannot be marked: pass --loss all, or a template with {{% generation %}}"
                )
            trained |= (starts >= len(before)) & (starts < len(after))
        return _document(encoded["input_ids"], trained)

    def _tokens(self, chunk: Sequence[tuple[int, Record]]) -> Iterator[Document]:
        """Rows that ``crosspack pack`` wrote, cut into their segments again."""
        for number, record in chunk:
            ids = np.asarray(record["input_ids"])
            labels = np.asarray(record.get("labels", ids))
            lengths = np.asarray(record.get("seq_lengths", [len(ids)]))
            if ids.shape != labels.shape or lengths.sum() != len(ids):
                raise PackingError(
                    f"record {number} has {len(ids)} input_ids, {len(labels)} labels and seq_lengths that add up to "
                    f"{lengths.sum()}: they must agree"
                )
            if ((labels != ids) & (labels != -100)).any():
                raise PackingError(f"record {number} has labels that are neither its input_ids nor -100: unshift them")
            cuts = np.cumsum(lengths)[:-1]
            for piece, label in zip(np.split(ids, cuts), np.split(labels, cuts), strict=True):
                yield _document(piece, label != -100)

    def _ids(self, texts: Iterable[str]) -> list[list[int]]:
        ids: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return ids

    _by_kind: ClassVar[dict[str, Callable[[Encoder, Sequence[tuple[int, Record]]], Iterator[Document]]]] = {
        "messages": _chats,
        "completion": _completions,
        "text": _texts,
        "input_ids": _tokens,
    }


def _document(ids: Any, trained: NDArray[np.bool_]) -> Document:
    return Document(np.asarray(ids, np.int32), trained)


def _kind(record: Record, number: int) -> str:
    """Which of the known columns the record has; the first that is there wins."""
    for kind, columns in (
        ("input_ids", ("input_ids",)),
        ("messages", ("messages",)),
        ("completion", ("prompt", "completion")),
        ("text", ("text",)),
    ):
        if all(record.get(column) is not None for column in columns):
            if kind == "text" and not isinstance(record["text"], str):
                raise PackingError(f"record {number}: text is a {type(record['text']).__name__}, not a string")
            return kind
    raise PackingError(
        f"record {number} has the columns {', '.join(record) or 'none'}: a record needs text, prompt + completion, "
        f"messages or input_ids, and none of them null"
    )


def _chat(record: Record, number: int) -> tuple[list[Any], int]:
    """The messages of a record and the number of the first one whose assistant turns are trained."""
    prompt = record.get("prompt") or []
    messages = record.get("messages") or [*prompt, *record["completion"]]
    if not all(isinstance(message, dict) and "role" in message for message in messages):
        raise PackingError(f"record {number}: a message is an object with role and content")
    return list(messages), 0 if record.get("messages") else len(prompt)
