"""Chats as tokens: templates, turns, tools, and what of them is trained."""

from __future__ import annotations

import pytest

from crosspack.encoding.text import Encoder, Policy, plain_texts
from packing_core.errors import MissingExtraError, PackingError
from tests.cli.encoded import CHAT, encode, trained_text, with_template

# the same format without marks for what the assistant says
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# forgets what the assistant said once another follows, as reasoning models forget their thoughts
FORGETFUL_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ':' }}"
    "{% if loop.last or message['role'] == 'user' %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


@pytest.mark.parametrize("marked", [True, False], ids=["generation tags", "prefixes"])
def test_only_what_the_assistant_says_is_trained(tokenizer, marked):
    chat = tokenizer if marked else with_template(tokenizer, PLAIN_TEMPLATE)
    (document,) = encode(chat, [{"messages": CHAT}])
    assert chat.decode(document.ids).startswith("<|im_start|>user\nThe quick fox?<|im_end|>\n<|im_start|>assistant\n")
    assert trained_text(chat, document) == "jumps<|im_end|>\nliquor jugs<|im_end|>\n"
    assert encode(chat, [{"messages": CHAT}], loss="all")[0].trained.all()


SHAREGPT = [{"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in CHAT]


@pytest.mark.parametrize("marked", [True, False], ids=["generation tags", "prefixes"])
@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"loss": False}], ids=repr)
def test_a_message_that_says_so_is_not_trained(tokenizer, marked, mark):
    chat = tokenizer if marked else with_template(tokenizer, PLAIN_TEMPLATE)
    whole = encode(chat, [{"messages": CHAT}])[0]
    for column, turns in (("messages", CHAT), ("conversations", SHAREGPT)):
        for number, says in ((1, "liquor jugs<|im_end|>\n"), (3, "jumps<|im_end|>\n")):
            some = [{**turn, **mark} if n == number else turn for n, turn in enumerate(turns)]
            (document,) = encode(chat, [{column: some}])
            assert document.ids.tolist() == whole.ids.tolist()
            assert trained_text(chat, document) == says
        weighted = [{**turn, "weight": 1} for turn in turns]
        assert encode(chat, [{column: weighted}])[0].trained.tolist() == whole.trained.tolist()
    (document,) = encode(chat, [{"prompt": CHAT[:1], "completion": [{**CHAT[1], **mark}, *CHAT[2:]]}])
    assert trained_text(chat, document) == "liquor jugs<|im_end|>\n"


def test_turns_that_stand_side_by_side_are_told_apart_by_their_weights(tokenizer):
    said = [CHAT[0], {**CHAT[1], "weight": 0}, CHAT[3]]
    for chat in (tokenizer, with_template(tokenizer, PLAIN_TEMPLATE)):
        assert trained_text(chat, encode(chat, [{"messages": said}])[0]) == "liquor jugs<|im_end|>\n"


@pytest.mark.parametrize(
    "record",
    [
        {"messages": CHAT},
        {"conversations": SHAREGPT},
        {"prompt": CHAT[:3], "completion": CHAT[3:]},
        {"conversations": [{"from": "system", "value": "Be lazy."}, *SHAREGPT]},
    ],
    ids=["messages", "conversations", "prompt", "twice"],
)
def test_the_system_column_begins_the_chat(tokenizer, record):
    plain = encode(tokenizer, [{**record, "system": ""}])[0]
    (document,) = encode(tokenizer, [{**record, "system": "Be lazy."}])
    assert tokenizer.decode(document.ids).startswith("<|im_start|>system\nBe lazy.<|im_end|>\n<|im_start|>user\nThe qu")
    assert trained_text(tokenizer, document) == trained_text(tokenizer, plain)
    assert "Be lazy." in list(plain_texts([{**record, "system": "Be lazy."}]))


def test_alpacas_system_and_history_stand_before_the_instruction(tokenizer):
    record = {"instruction": "quick", "input": "box", "output": "zebras", "system": "Be lazy.", "history": [["a", "b"]]}
    (document,) = encode(tokenizer, [record])
    assert tokenizer.decode(document.ids) == (
        "Be lazy.\n\n### Instruction:\na\n\n### Response:\nb\n\n"
        "### Instruction:\nquick\n\n### Input:\nbox\n\n### Response:\nzebras<|endoftext|>"
    )
    assert trained_text(tokenizer, document) == "zebras<|endoftext|>"


def test_tools_that_a_file_holds_as_json_reach_the_template(tokenizer):
    template = "{% for tool in tools or [] %}{{ tool.name }};{% endfor %}" + PLAIN_TEMPLATE
    chat = with_template(tokenizer, template)
    for record in ({"messages": CHAT}, {"conversations": SHAREGPT}, {"prompt": CHAT[:3], "completion": CHAT[3:]}):
        for tools in ('[{"name": "fox"}]', [{"name": "fox"}]):
            (document,) = encode(chat, [{**record, "tools": tools}])
            assert chat.decode(document.ids).startswith("fox;<|im_start|>user")


TOOL_TURNS = [
    {"from": "human", "value": "quick?"},
    {"from": "function_call", "value": '{"name": "jump", "arguments": {"over": "dog"}}'},
    {"from": "observation", "value": "lazy"},
    {"from": "gpt", "value": "fox", "weight": 0},
]


def test_tool_calls_of_sharegpt_are_written_and_trained(tokenizer):
    (document,) = encode(tokenizer, [{"conversations": TOOL_TURNS, "tools": '[{"name": "jump"}]'}])
    call = '<tool_call>{"name": "jump", "arguments": {"over": "dog"}}</tool_call><|im_end|>\n'
    assert tokenizer.decode(document.ids) == (
        f"<|im_start|>user\nquick?<|im_end|>\n<|im_start|>assistant\n{call}<|im_start|>tool\nlazy<|im_end|>\n"
        "<|im_start|>assistant\nfox<|im_end|>\n"
    )
    assert trained_text(tokenizer, document) == call
    several = [TOOL_TURNS[0], {"from": "function-call", "value": [{"name": "a", "arguments": "{}"}, {"name": "b"}]}]
    assert '{"name": "b", "arguments": {}}' in tokenizer.decode(encode(tokenizer, [{"conversations": several}])[0].ids)


def test_a_template_that_leaves_tool_calls_out_is_refused(tokenizer):
    plain = with_template(tokenizer, PLAIN_TEMPLATE)
    with pytest.raises(PackingError, match="record 0: the chat template does not write the call of jump in message 1"):
        encode(plain, [{"conversations": TOOL_TURNS}])


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("jump(dog)", "record 0: message 0 calls a tool by what is not JSON"),
        ('{"arguments": {}}', 'message 0 calls a tool: pass {"name": ..., "arguments": {...}}, or a list of them'),
        ([], "message 0 calls a tool: pass"),
    ],
)
def test_a_call_that_cannot_be_read_is_named(tokenizer, value, says):
    with pytest.raises(PackingError) as error:
        encode(tokenizer, [{"conversations": [{"from": "function_call", "value": value}]}])
    assert says in str(error.value)


def test_a_conversational_prompt_trains_only_the_completion(tokenizer):
    (document,) = encode(tokenizer, [{"prompt": CHAT[:3], "completion": CHAT[3:]}])
    assert trained_text(tokenizer, document) == "liquor jugs<|im_end|>\n"


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_way_out(tokenizer):
    forgetful = with_template(tokenizer, FORGETFUL_TEMPLATE)
    with pytest.raises(PackingError, match=r"record 0: .*message 1 differently when more follow.*--loss all"):
        encode(forgetful, [{"messages": CHAT}])
    assert trained_text(forgetful, encode(forgetful, [{"messages": CHAT[:2]}])[0]) == "jumps"


def test_a_template_that_raises_is_one_line_with_the_record(tokenizer):
    strict = with_template(tokenizer, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(PackingError, match=r"^record 0: the chat template refused it: roles must alternate$"):
        encode(strict, [{"messages": CHAT}])


def test_a_missing_jinja2_is_named_and_no_record_is_blamed_for_it(tokenizer, monkeypatch):
    from transformers.utils import chat_template_utils

    chat = with_template(tokenizer, PLAIN_TEMPLATE + "{# a template is compiled once: this one never was #}")
    monkeypatch.setattr(chat_template_utils, "is_jinja_available", lambda: False)
    refused = []
    with pytest.raises(MissingExtraError, match=r"^chat templates cannot run here: .*pip install jinja2"):
        list(Encoder(chat, Policy()).encoded([{"messages": CHAT}], lambda found, error: refused.append(error)))
    assert not refused


def test_a_tokenizer_without_template_cannot_write_chats(tokenizer):
    with pytest.raises(PackingError, match="record 0: the tokenizer has no chat template: pass --tokenizer"):
        encode(with_template(tokenizer, None), [{"messages": CHAT}])


def test_a_long_chat_is_rendered_in_linear_time(tokenizer, monkeypatch):
    chat = with_template(tokenizer, PLAIN_TEMPLATE)
    written = [0]
    render = type(chat).apply_chat_template

    def counting(self, messages, **options):
        written[0] += len(messages)
        return render(self, messages, **options)

    monkeypatch.setattr(type(chat), "apply_chat_template", counting)
    roles = ["user", "assistant"] * 50
    messages = [{"role": role, "content": f" fox {n} dog\n"} for n, role in enumerate(roles)]
    (document,) = encode(chat, [{"messages": messages}])
    assert written[0] <= 8 * len(messages)
    said = "".join(f" fox {n} dog\n<|im_end|>\n" for n in range(1, 100, 2))
    assert trained_text(chat, document) == said
