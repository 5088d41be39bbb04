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


def test_text_is_trained_whole_and_ends_with_eos(tokenizer):
    (document,) = encode(tokenizer, [{"text": "lazy dog"}])
    assert document.ids.dtype == np.int32
    assert tokenizer.decode(document.ids) == "lazy dog<|endoftext|>"
    assert document.trained.all()


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


def test_a_prompt_is_not_trained_and_the_eos_after_the_completion_is(tokenizer):
    (document,) = encode(tokenizer, [{"prompt": "lazy dog", "completion": " jumps"}])
    assert tokenizer.decode(document.ids) == "lazy dog jumps<|endoftext|>"
    assert trained_text(tokenizer, document) == " jumps<|endoftext|>"


def test_loss_all_trains_the_prompt_too(tokenizer):
    (document,) = encode(tokenizer, [{"prompt": "lazy dog", "completion": " jumps"}], loss="all")
    assert document.trained.all()


def test_prompt_and_completion_are_tokenised_apart(tokenizer):
    (document,) = encode(tokenizer, [{"prompt": "qui", "completion": "ck"}])
    apart = tokenizer("qui")["input_ids"] + tokenizer("ck")["input_ids"] + [tokenizer.eos_token_id]
    assert document.ids.tolist() == apart


def test_bos_follows_the_tokenizer_unless_asked_otherwise(tokenizer):
    copy = tokenizer.__class__(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|endoftext|>")
    copy.bos_token = "<|im_start|>"
    assert encode(copy, [{"text": "dog dog"}])[0].ids[0] != copy.bos_token_id
    assert encode(copy, [{"text": "dog dog"}], bos=True)[0].ids[0] == copy.bos_token_id
    assert encode(copy, [{"text": "dog dog"}], eos=False)[0].ids[-1] != copy.eos_token_id


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


def test_asking_for_a_token_that_the_tokenizer_lacks_is_an_error(tokenizer):
    with pytest.raises(PackingError, match="--bos was given and the tokenizer has no BOS token: leave --bos out"):
        Encoder(tokenizer, Policy(bos=True))


def test_packed_rows_are_cut_into_their_documents_again(tokenizer):
    row = {"input_ids": [5, 6, 7, 8, 9], "labels": [-100, 6, -100, -100, 9], "seq_lengths": [2, 3]}
    first, second = encode(tokenizer, [row])
    assert (first.ids.tolist(), first.trained.tolist()) == ([5, 6], [False, True])
    assert (second.ids.tolist(), second.trained.tolist()) == ([7, 8, 9], [False, False, True])


def ids_and_trained(tokenizer, record):
    return [(document.ids.tolist(), document.trained.tolist()) for document in encode(tokenizer, [record])]


def test_padding_of_tokenised_rows_is_cut_off(tokenizer):
    row = {"input_ids": [0, 5, 6, 7, 0], "attention_mask": [0, 1, 1, 1, 0]}
    assert ids_and_trained(tokenizer, row) == [([5, 6, 7], [True] * 3)]


@pytest.mark.parametrize(
    "marks",
    [
        {"position_ids": [0, 1, 0, 1, 2]},
        {"attention_mask": [1, 1, 2, 2, 2]},
        {"segment_ids": [1, 1, 2, 2, 2]},
        {"seq_lengths": [2, 3], "position_ids": [0, 1, 0, 1, 2]},
    ],
)
def test_rows_that_others_packed_are_cut_into_their_documents(tokenizer, marks):
    row = {"input_ids": [5, 6, 7, 8, 9], **marks}
    assert ids_and_trained(tokenizer, row) == [([5, 6], [True] * 2), ([7, 8, 9], [True] * 3)]


def test_masks_and_prompts_of_tokenised_rows_are_honoured(tokenizer):
    row = {"input_ids": [5, 6, 7, 8, 9], "labels": [5, 6, 7, 8, -100], "loss_mask": [1, 1, 1, 0, 1], "prompt_length": 2}
    assert ids_and_trained(tokenizer, row) == [([5, 6, 7, 8, 9], [False, False, True, False, False])]


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


def test_any_bytes_survive_the_trained_tokenizer(tokenizer):
    text = "ünïcode \t\n 漢字 🦊"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_saved_tokenizer_loads_again(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded("lazy dog")["input_ids"] == tokenizer("lazy dog")["input_ids"]
    assert (
        encode(loaded, [{"messages": CHAT}])[0].ids.tolist() == encode(tokenizer, [{"messages": CHAT}])[0].ids.tolist()
    )


def test_a_tokenizer_that_is_nowhere_is_one_line(tmp_path):
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
    ],
)
def test_records_with_images_are_refused_and_not_trained_without_them(record, column):
    message = (
        f"record 0 has {column}, which is not read here: `crosspack train --model` trains records with images, of "
    )
    with pytest.raises(PackingError, match=re.escape(message)):
        canonical(record, "record 0", ())
    without = {name: value for name, value in record.items() if name != column} | {column: []}
    if "messages" not in record or record["messages"] is CHAT:
        canonical(without, "record 0", ())
    canonical({"input_ids": [1], "images": ["a.png"]}, "record 0", ())
    canonical(record | {"body": "a"}, "record 0", (("text", "body"),))
