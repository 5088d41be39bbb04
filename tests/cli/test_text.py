"""Records to token ids and loss masks: what is added, what is trained, and in which order."""

from __future__ import annotations

import pickle
import re
import sys

import numpy as np
import pytest

from crosspack.encoding import kinds
from crosspack.encoding.layouts import canonical
from crosspack.encoding.text import Encoder, Policy, plain_texts
from crosspack.encoding.tokenizer import load_tokenizer, train_tokenizer
from packing_core.errors import PackingError
from tests import processes
from tests.cli.encoded import CHAT, encode, trained_text


def test_texts_and_completions_are_trained_with_their_eos_and_prompts_are_not(tokenizer):
    (document,) = encode(tokenizer, [{"text": "lazy dog"}])
    assert document.ids.dtype == np.int32 and document.trained.all()
    assert tokenizer.decode(document.ids) == "lazy dog<|endoftext|>"
    pair = {"prompt": "lazy dog", "completion": " jumps"}
    (document,) = encode(tokenizer, [pair])
    assert tokenizer.decode(document.ids) == "lazy dog jumps<|endoftext|>"
    assert trained_text(tokenizer, document) == " jumps<|endoftext|>"
    assert encode(tokenizer, [pair], loss="all")[0].trained.all()
    (document,) = encode(tokenizer, [{"prompt": "qui", "completion": "ck"}])  # tokenised apart
    parts = tokenizer("qui")["input_ids"] + tokenizer("ck")["input_ids"] + [tokenizer.eos_token_id]
    assert document.ids.tolist() == parts


def test_another_process_encodes_texts_without_importing_transformers(tokenizer, tmp_path):
    (tmp_path / "encoder").write_bytes(pickle.dumps(Encoder(tokenizer, Policy())))
    program = (
        "import pickle, sys; encoder = pickle.load(open(sys.argv[1], 'rb'));"
        "print(next(encoder([{'text': 'lazy dog'}])).ids.tolist(), 'transformers' in sys.modules);"
        "print(next(encoder([{'messages': [{'role': 'assistant', 'content': 'dog'}]}])).trained.sum())"
    )
    said = processes.run([sys.executable, "-c", program, str(tmp_path / "encoder")])
    expected = [document.ids.tolist() for document in encode(tokenizer, [{"text": "lazy dog"}])]
    chat = encode(tokenizer, [{"messages": [{"role": "assistant", "content": "dog"}]}])[0]
    assert said.stdout.splitlines() == [f"{expected[0]} False", str(chat.trained.sum())], said.stderr


def test_bos_follows_the_tokenizer_unless_asked_otherwise(tokenizer):
    copy = tokenizer.__class__(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|endoftext|>")
    copy.bos_token = "<|im_start|>"
    assert encode(copy, [{"text": "dog dog"}])[0].ids[0] != copy.bos_token_id
    assert encode(copy, [{"text": "dog dog"}], bos=True)[0].ids[0] == copy.bos_token_id
    assert encode(copy, [{"text": "dog dog"}], eos=False)[0].ids[-1] != copy.eos_token_id
    with pytest.raises(PackingError, match="--bos was given and the tokenizer has no BOS token: leave --bos out"):
        Encoder(tokenizer, Policy(bos=True))


def test_a_tokenizer_that_adds_bos_by_itself_adds_it_once(tokenizer):
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    inner = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    bos = inner.token_to_id("<|im_start|>")
    inner.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)])
    copy = tokenizer.__class__(tokenizer_object=inner, bos_token="<|im_start|>", eos_token="<|endoftext|>")
    (document,) = encode(copy, [{"prompt": "dog", "completion": " jumps"}])
    assert document.ids.tolist().count(bos) == 1
    assert document.ids[0] == bos
    assert encode(copy, [{"text": "dog dog"}], bos=False)[0].ids[0] != bos


FIVE = [5, 6, 7, 8, 9]
TWO_DOCUMENTS = [([5, 6], [True] * 2), ([7, 8, 9], [True] * 3)]


@pytest.mark.parametrize(
    ("row", "documents"),
    [
        (
            {"input_ids": FIVE, "labels": [-100, 6, -100, -100, 9], "seq_lengths": [2, 3]},
            [([5, 6], [False, True]), ([7, 8, 9], [False, False, True])],
        ),
        ({"input_ids": [0, 5, 6, 7, 0], "attention_mask": [0, 1, 1, 1, 0]}, [([5, 6, 7], [True] * 3)]),
        ({"input_ids": FIVE, "position_ids": [0, 1, 0, 1, 2]}, TWO_DOCUMENTS),
        ({"input_ids": FIVE, "attention_mask": [1, 1, 2, 2, 2]}, TWO_DOCUMENTS),
        ({"input_ids": FIVE, "segment_ids": [1, 1, 2, 2, 2]}, TWO_DOCUMENTS),
        ({"input_ids": FIVE, "seq_lengths": [2, 3], "position_ids": [0, 1, 0, 1, 2]}, TWO_DOCUMENTS),
        (
            {"input_ids": FIVE, "labels": [5, 6, 7, 8, -100], "loss_mask": [1, 1, 1, 0, 1], "prompt_length": 2},
            [(FIVE, [False, False, True, False, False])],
        ),
    ],
)
def test_tokenised_rows_are_cut_into_their_documents_and_their_masks_honoured(tokenizer, row, documents):
    assert [(each.ids.tolist(), each.trained.tolist()) for each in encode(tokenizer, [row])] == documents


def test_records_are_tokenised_some_bytes_at_a_time(tokenizer, monkeypatch):
    sizes = []
    ids = Encoder._ids

    def watched(self, texts):
        texts = list(texts)
        sizes.append(sum(map(len, texts)))
        return ids(self, texts)

    monkeypatch.setattr(Encoder, "_ids", watched)
    monkeypatch.setattr(kinds, "_CHUNK_BYTES", 1000)
    read = [0]

    def records():
        for _ in range(40):
            read[0] += 1
            yield {"text": "fox " * 75}

    documents = Encoder(tokenizer, Policy())(records())
    next(documents)
    assert read[0] <= 5
    assert sum(1 for _ in documents) == 39
    assert max(sizes) < 2000


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"input_ids": [1, 2**31 + 5]}, "record 0: input_ids has 2147483653: a token id is 0 to 2,147,483,647"),
        ({"input_ids": [1, -7]}, "record 0: input_ids has -7: a token id is 0 to"),
        ({"input_ids": [1, 2.5]}, "record 0: input_ids is not a list of whole numbers"),
        ({"input_ids": [1, 2.0]}, "record 0: input_ids is not a list of whole numbers"),
        ({"input_ids": [1, None]}, "record 0: input_ids is not a list of whole numbers"),
        ({"input_ids": [1, 2**80]}, "record 0: input_ids is not a list of whole numbers"),
        ({"input_ids": [[1], [2, 3]]}, "record 0: input_ids is not a list of whole numbers"),
        ({"input_ids": "12"}, "record 0: input_ids is not a list of whole numbers"),
        ({"input_ids": 12}, "record 0: input_ids is not a list of whole numbers"),
        ({"input_ids": [1, 2], "labels": [1, None]}, "record 0: labels is not a list of whole numbers"),
        ({"input_ids": [1, 2], "labels": [1]}, "record 0: example 0 has 1 labels and 2 input_ids"),
        ({"input_ids": [1, 2, 3, 4], "seq_lengths": [5, -1]}, "record 0: seq_lengths holds -1"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "token 1 of example 0 is padding inside a document"),
        ({"input_ids": [1, 2, 3], "attention_mask": [0, 0, 0]}, "example 0 has no tokens but padding"),
        ({"input_ids": [1, 2, 3], "position_ids": [5, 6, 7]}, "position_ids of example 0 do not count 0, 1, 2"),
        ({"input_ids": [1, 2], "loss_mask": [0, 7]}, "record 0: loss_mask has values other than 0 and 1"),
        ({"input_ids": [1, 2], "prompt_length": 3}, "record 0: prompt_length is 3 and the document has 2 tokens"),
        ({"prompt": "a", "completion": 7}, "record 0: prompt is a str and completion is a int: both must be strings"),
        ({"prompt": "a", "completion": [{"role": "assistant"}]}, "both must be strings, or both lists of messages"),
        ({"text": "\ud83d"}, "the text is not valid Unicode, repair it"),
        ({"messages": "hello"}, "record 0: messages is a list of objects with role and content"),
        (
            {"input_ids": [1, 2, 3], "seq_lengths": [2]},
            "record 0: seq_lengths add up to 2 and input_ids has 3 tokens",
        ),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "labels that are neither its input_ids nor -100"),
        ({"question": "a", "answer": "b"}, "record 0 has the columns question, answer: a record needs text, prompt +"),
        ({"text": None}, "a record needs text"),
        ({"text": 7}, "record 0: text is a int, not a string"),
        (
            {"input_ids": [1, 500]},
            "record 0: input_ids has 500 and the tokenizer 320 entries: pass the --tokenizer that",
        ),
        (
            {"prompt": "a", "completion": "b", "system": "c"},
            "record 0 has a system beside a prompt of text: write it into",
        ),
        ({"messages": CHAT, "system": 7}, "record 0: system is a int, not a string"),
        ({"messages": [{"role": "system", "content": "a"}], "system": "b"}, "a system message and another text in its"),
        ({"messages": CHAT, "tools": "fox"}, "record 0: tools is a string that is not JSON"),
        ({"messages": [{**CHAT[1], "weight": 0.5}]}, "record 0: message 0 has the weight 0.5: 0 leaves it untrained"),
        (
            {"instruction": "a", "output": "b", "history": [["c"]]},
            "record 0: history is a list of [instruction, response]",
        ),
        ({"instruction": "a", "output": "b", "system": ["c"]}, "record 0: system is a list, not a string"),
        ({"messages": ["hello"]}, "record 0: messages is a list of objects with role and content"),
    ],
)
def test_a_record_that_cannot_be_read_says_why(tokenizer, record, says):
    with pytest.raises(PackingError, match=re.escape(says)):
        encode(tokenizer, [record])


def test_records_without_anything_to_train_are_left_out_and_counted(tokenizer):
    encoder = Encoder(tokenizer, Policy())
    empty = [{"text": ""}, {"messages": []}, {"prompt": [], "completion": []}, {"input_ids": []}]
    records = [*empty, {"text": "lazy dog"}, {"prompt": "dog", "completion": ""}]
    assert len(list(encoder(records))) == 2  # the empty completion still has its EOS
    assert encoder.left_out == 4


def test_kinds_may_alternate_and_order_is_kept(tokenizer):
    records = [{"text": "dog dog"}, {"messages": CHAT[:2]}, {"prompt": "a", "completion": "b"}, {"text": "fox fox"}]
    starts = [tokenizer.decode(document.ids)[:5] for document in encode(tokenizer, records)]
    assert starts == ["dog d", "<|im_", "ab<|e", "fox f"]


def test_the_policy_is_stated_in_one_line(tokenizer):
    assert Encoder(tokenizer, Policy()).describe() == (
        "BOS none, EOS <|endoftext|> (trained); chats as their template writes them; "
        "loss on: completions and assistant turns; plain text in full"
    )
    assert (
        Encoder(tokenizer, Policy("all", eos=False))
        .describe()
        .endswith("EOS none; chats as their template writes them; loss on: all tokens")
    )


def test_training_a_tokenizer_repeats_and_reads_every_column():
    records = [{"text": "aa bb"}, {"prompt": "cc", "completion": "dd"}, {"messages": CHAT[:1]}]
    texts = list(plain_texts(records))
    assert texts == ["aa bb", "cc", "dd", "The quick fox?"]
    first, second = (train_tokenizer(texts * 9, 300) for _ in range(2))
    assert first.get_vocab() == second.get_vocab()
    assert len(first) <= 300
    with pytest.raises(PackingError, match="record 0 holds token ids: pass --tokenizer, the one they were made with"):
        list(plain_texts([{"input_ids": [1]}]))


def test_a_tokenizer_of_much_data_is_trained_on_its_beginning(monkeypatch):
    monkeypatch.setattr("crosspack.encoding.tokenizer._LEARNED", 90)
    texts = iter(["zebras vex a sphinx " * 2] * 100)
    train_tokenizer(texts, 300)
    assert len(list(texts)) == 97


def test_a_tokenizer_that_is_trained_keeps_any_bytes_and_loads_again(tokenizer, tmp_path):
    text = "ünïcode \t\n 漢字 🦊"
    tokenizer.save_pretrained(tmp_path / "saved")
    loaded = load_tokenizer(str(tmp_path / "saved"))
    assert loaded.decode(loaded(text)["input_ids"]) == text
    chats = [encode(each, [{"messages": CHAT}])[0].ids.tolist() for each in (loaded, tokenizer)]
    assert chats[0] == chats[1]
    with pytest.raises(PackingError, match="no such folder, and not a hub name"):
        load_tokenizer(str(tmp_path / "absent"))
    with pytest.raises(PackingError, match=r"^tokenizer .*: [^\n]*$"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("record", "column"),
    [
        ({"messages": CHAT, "images": ["a.png"]}, "images"),
        ({"text": "a fox", "image": {"bytes": b"", "path": "a.png"}}, "image"),
        ({"prompt": "a", "completion": "b", "videos": ["a.mp4"]}, "videos"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "a.png"}]}]}, "image_url"),
        ({"prompt": [], "completion": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input_audio"),
    ],
)
def test_records_with_images_are_refused_and_not_trained_without_them(record, column):
    message = f"record 0 has {column}, which this command does not read: use `crosspack train` with a --model that "
    with pytest.raises(PackingError, match=re.escape(message)):
        canonical(record, "record 0", ())
    without = {name: value for name, value in record.items() if name != column} | {column: []}
    if column in record:
        canonical(without, "record 0", ())
    canonical({"input_ids": [1], "images": ["a.png"]}, "record 0", ())
    named_alike = [{"type": "image_description", "text": "a fox"}, {"type": "text", "text": "b"}]
    canonical({"messages": [{"role": "user", "content": named_alike}]}, "record 0", ())
    canonical(record | {"body": "a"}, "record 0", (("text", "body"),))
    if column not in record:  # but beside its columns, in its messages
        with pytest.raises(PackingError, match=re.escape(message)):
            canonical(record, "record 0", tuple((name, name) for name in record))
