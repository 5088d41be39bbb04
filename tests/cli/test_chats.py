"""Chats as tokens: templates, turns, tools, and what of them is trained."""

from __future__ import annotations

import re

import pytest

from crosspack.cli.options import check_data
from crosspack.encoding.chats import lost_field
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
    for column in ("messages", "conversations"):
        assert encode(chat, [{column: SHAREGPT}])[0].ids.tolist() == document.ids.tolist()
    (document,) = encode(chat, [{"prompt": CHAT[:3], "completion": CHAT[3:]}])
    assert trained_text(chat, document) == "liquor jugs<|im_end|>\n"
    observed = [CHAT[0], {"role": "observation", "content": "fox"}, CHAT[1]]  # a role of the template's own
    assert trained_text(chat, encode(chat, [{"messages": observed}])[0]) == "jumps<|im_end|>\n"
    (document,) = encode(chat, [{"messages": [CHAT[0], {**CHAT[1], "weight": 0}, CHAT[3]]}])  # side by side
    assert trained_text(chat, document) == "liquor jugs<|im_end|>\n"


SHAREGPT = [{"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in CHAT]


@pytest.mark.parametrize("marked", [True, False], ids=["generation tags", "prefixes"])
@pytest.mark.parametrize(
    "mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"train": 0}, {"loss": 0.0}], ids=repr
)
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


@pytest.mark.parametrize(
    "mark", [{"train": "false"}, {"loss": "no"}, {"weight": "0"}, {"train": 2}, {"loss": []}], ids=repr
)
def test_a_mark_that_is_neither_yes_nor_no_or_contradicts_the_loss_is_refused(tokenizer, mark):
    ((name, value),) = mark.items()
    says = re.escape(f"record 0: message 1 has the {name} {value!r}: 0 leaves it untr")
    for loss in ("completion", "all"):
        with pytest.raises(PackingError, match=says):
            encode(tokenizer, [{"messages": [CHAT[0], CHAT[1] | mark]}], loss=loss)
    untrained = [{**CHAT[0], name: 0}, *CHAT[1:]]
    with pytest.raises(PackingError, match="message 0 says that it is not trained, and --loss all trains"):
        encode(tokenizer, [{"messages": untrained}], loss="all")


def test_blocks_belong_to_the_turn_that_they_stand_in_however_many_it_has(tokenizer):
    body = "{% generation %}{{ message['content'] }}{% endgeneration %}"
    end = "{% generation %}<|im_end|>{% endgeneration %}"
    several = with_template(tokenizer, SHELL % f"assistant:{body} {end}")
    once_at_the_end = with_template(tokenizer, SHELL % f"assistant:{body}" + end)
    for skipped, says in ((1, "liquor jugs<|im_end|>"), (3, "jumps<|im_end|>")):
        some = [{**turn, "train": n != skipped} for n, turn in enumerate(CHAT)]
        assert trained_text(several, encode(several, [{"messages": some}])[0]) == says
    some = [{**turn, "train": n != 1} for n, turn in enumerate(CHAT)]
    document = encode(once_at_the_end, [{"messages": some}])[0]
    assert trained_text(once_at_the_end, document) == "liquor jugs<|im_end|>"


def test_a_call_of_thousands_of_equal_arguments_is_looked_up_in_linear_time(tokenizer):
    call = {"function": {"name": "jump", "arguments": {"over": [0] * 20_000}}}
    said = {"role": "assistant", "content": "0" * 9, "tool_calls": [call]}
    assert encode(tokenizer, [{"messages": [CHAT[0], said]}])
    assert lost_field("jumpover" + "0" * 20_000, said) == "an argument of the call of jump"


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


CALL = {"tool_calls": [{"type": "function", "function": {"name": "jump", "arguments": {"over": 'a "dog"'}}}]}
SAID = "{{ message['content'] }}"
NAMED = "{{ message['tool_calls'][0]['function']['name'] }}"
# field -> what the assistant says, and what a template that leaves the field out writes of it
LOSSY = {
    "content": (CALL | {"content": "jumps"}, "{{ message['tool_calls'] | tojson }}"),
    "reasoning": ({"content": "jumps", "reasoning": "lazy"}, SAID),
    "refusal": ({"content": "", "refusal": "lazy"}, SAID),
    "the call of jump": (CALL | {"content": "fox"}, SAID),
    "an argument of the call of jump": (CALL | {"content": "fox"}, SAID + NAMED),
}
SHELL = (
    "{%% for message in messages %%}{%% if message['role'] == 'assistant' %%}%s{%% else %%}{{ message['content'] }}\n"
    "{%% endif %%}{%% endfor %%}{%% if add_generation_prompt %%}assistant:{%% endif %%}"
)


@pytest.mark.parametrize("turn", ["assistant:%s", "assistant:{%% generation %%}%s{%% endgeneration %%}"])
@pytest.mark.parametrize("field", LOSSY)
def test_a_field_of_a_trained_turn_that_a_template_does_not_write_is_named(tokenizer, field, turn):
    message, written = LOSSY[field]
    chat = with_template(tokenizer, SHELL % (turn % written))
    said = {"role": "assistant", **message}
    for loss in ("completion", "all"):
        with pytest.raises(PackingError, match=f"record 0: the chat template does not write {field} in message 1, so"):
            encode(chat, [{"messages": [CHAT[0], said]}], loss=loss)
    assert not encode(chat, [{"messages": [CHAT[0], said | {"train": False}]}])


def test_a_call_that_a_template_writes_outside_of_what_it_marks_is_named(tokenizer):
    turn = "assistant:{% generation %}" + SAID + "{% endgeneration %}{{ message['tool_calls'] | tojson }}"
    said = {"role": "assistant", "content": "fox", **CALL}
    with pytest.raises(PackingError, match="does not write the call of jump in message 1"):
        encode(with_template(tokenizer, SHELL % turn), [{"messages": [CHAT[0], said]}])


def test_reasoning_and_calls_are_trained_by_the_template_of_trained_tokenizers(tokenizer):
    said = {"role": "assistant", "content": "jumps", "reasoning_content": 'lazy "dog"', **CALL}
    (document,) = encode(tokenizer, [{"messages": [CHAT[0], said]}])
    assert trained_text(tokenizer, document) == (
        '<think>\nlazy "dog"\n</think>\n\njumps<tool_call>{"name": "jump", "arguments": {"over": "a \\"dog\\""}}'
        "</tool_call><|im_end|>\n"
    )


def test_texts_of_an_api_are_written_as_the_texts_of_templates(tokenizer):
    """Templates that know parts by their type leave those of other types out, without a word."""
    parts = "message['content'] | selectattr('type', 'equalto', 'text') | map(attribute='text') | join"
    chat = with_template(tokenizer, PLAIN_TEMPLATE.replace("message['content']", f"({parts})"))

    def turns(of_user, of_assistant):
        types = {"user": of_user, "assistant": of_assistant}
        return [{**turn, "content": [{"type": types[turn["role"]], "text": turn["content"]}]} for turn in CHAT]

    kinds = (("input_text", "output_text"), ("text", "text"))
    api, template = (encode(chat, [{"messages": turns(*types)}])[0] for types in kinds)
    assert api.ids.tolist() == template.ids.tolist() and trained_text(chat, api) == trained_text(chat, template)
    assert "The quick fox?" in chat.decode(api.ids)


def test_a_tokenizer_that_does_not_say_where_its_tokens_stand_is_refused(tokenizer, monkeypatch):
    chat = with_template(tokenizer, tokenizer.chat_template)
    monkeypatch.setattr(type(chat), "is_fast", False)
    with pytest.raises(
        PackingError, match="record 0: the tokenizer is a .*, which does not say where its tokens stand"
    ):
        encode(chat, [{"messages": CHAT}])
    assert encode(chat, [{"messages": CHAT}], loss="all")


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


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_way_out(tokenizer):
    forgetful = with_template(tokenizer, FORGETFUL_TEMPLATE)
    with pytest.raises(PackingError, match=r"record 0: .*message 1 differently when more follow.*--loss all"):
        encode(forgetful, [{"messages": CHAT}])
    assert trained_text(forgetful, encode(forgetful, [{"messages": CHAT[:2]}])[0]) == "jumps"
    untrained = [CHAT[0], CHAT[1] | {"train": False}, *CHAT[2:]]
    for record in ({"messages": untrained}, {"prompt": CHAT[:2], "completion": CHAT[2:]}):
        assert trained_text(forgetful, encode(forgetful, [record])[0]) == "liquor jugs"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "the chat template refused it: roles must alternate$"),
        (None, "the tokenizer has no chat template: pass --tokenizer"),
    ],
)
def test_a_template_that_raises_or_is_missing_is_one_line_with_the_record(tokenizer, template, says):
    with pytest.raises(PackingError, match=f"^record 0: {says}"):
        encode(with_template(tokenizer, template), [{"messages": CHAT}])


def test_a_missing_jinja2_is_named_and_no_record_is_blamed_for_it(tokenizer, monkeypatch):
    from transformers.utils import chat_template_utils

    chat = with_template(tokenizer, PLAIN_TEMPLATE + "{# a template is compiled once: this one never was #}")
    monkeypatch.setattr(chat_template_utils, "is_jinja_available", lambda: False)
    refused = []
    with pytest.raises(MissingExtraError, match=r"^chat templates cannot run here: .*pip install jinja2"):
        list(Encoder(chat, Policy()).encoded([{"messages": CHAT}], lambda found, error: refused.append(error)))
    assert not refused


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


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be lazy."}]], ids=["alone", "system"])
@pytest.mark.parametrize(
    "template",
    [
        PLAIN_TEMPLATE,
        "{% if not messages | map(attribute='role') | select('eq', 'user') | list %}{{ raise_exception('no user') }}"
        "{% endif %}" + PLAIN_TEMPLATE,
        "{{ 'You are a fox.' }}" + PLAIN_TEMPLATE,
    ],
    ids=["plain", "wants a user", "writes a system prompt"],
)
def test_a_chat_that_begins_with_the_assistant_is_trained(tokenizer, template, system):
    chat = with_template(tokenizer, template)
    for messages in (CHAT[1:], [CHAT[3], *CHAT[1:]]):
        (document,) = encode(chat, [{"messages": [*system, *messages]}])
        said = [message["content"] + "<|im_end|>\n" for message in messages if message["role"] == "assistant"]
        assert trained_text(chat, document) == "".join(said)
    twice = [*system, CHAT[1] | {"weight": 0}, *CHAT[1:]]
    (document,) = encode(chat, [{"messages": twice}])
    assert chat.decode(document.ids[: document.trained.argmax()]).count("jumps") == 1
    assert trained_text(chat, document) == "jumps<|im_end|>\nliquor jugs<|im_end|>\n"
    (document,) = encode(chat, [{"conversations": SHAREGPT[1:]}])
    assert trained_text(chat, document) == "jumps<|im_end|>\nliquor jugs<|im_end|>\n"


@pytest.mark.parametrize(
    ("roles", "says"),
    [
        (
            ["human", "gpt"],
            "roles 'human', 'gpt', and templates know system,.*('human' is 'user', 'gpt' is 'assistant')",
        ),
        (["user", "model"], "messages have the roles 'model', and"),
        (["User", "Assistant"], "('User' is 'user', 'Assistant' is 'assistant'), or write from and value"),
        (["client", "helper"], "messages have the roles 'client', 'helper', and templates know"),
        (["user", "function_call", "assistant"], "'function_call' is 'assistant'"),
    ],
)
def test_roles_that_hide_the_assistants_turns_are_named(tokenizer, roles, says):
    messages = [{"role": role, "content": "fox"} for role in roles]
    for record in ({"messages": messages}, {"prompt": messages[:1], "completion": messages[1:]}):
        with pytest.raises(PackingError, match="record 0: .*" + says.replace("(", r"\(").replace(")", r"\)")):
            encode(tokenizer, [record])
    with pytest.raises(PackingError, match="record 0: messages have the roles"):
        list(plain_texts([{"messages": messages}]))


@pytest.mark.parametrize("name", ["data.jsonl", "data.parquet"])
@pytest.mark.parametrize(
    ("record", "task"),
    [
        ({"chosen": CHAT[:2], "rejected": CHAT[:2]}, "dpo"),
        ({"prompt": "fox", "chosen": "dog", "rejected": "box"}, "dpo"),
        ({"prompt": "fox", "completion": "dog", "label": False}, "kto"),
    ],
)
def test_records_of_preferences_name_the_task_that_trains_them(tokenizer, write, name, record, task):
    with pytest.raises(PackingError, match=f"crosspack train --task {task}"):
        check_data([str(write(name, [record]))], "train")
    columns = (("prompt", "prompt"), ("completion", "completion"))
    assert task == "dpo" or encode(tokenizer, [record], fields=columns)
