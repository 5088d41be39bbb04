"""Records as tokens, and which of them are trained."""

from __future__ import annotations

from crosspack.encoding.text import Encoder, Policy

CHAT = [
    {"role": "user", "content": "The quick fox?"},
    {"role": "assistant", "content": "jumps"},
    {"role": "user", "content": "box?"},
    {"role": "assistant", "content": "liquor jugs"},
]


def encode(tokenizer, records, **policy):
    return list(Encoder(tokenizer, Policy(**policy))(records))


def trained_text(tokenizer, document):
    return tokenizer.decode(document.ids[document.trained])


def with_template(tokenizer, template):
    copy = tokenizer.__class__(tokenizer_object=tokenizer.backend_tokenizer, eos_token=tokenizer.eos_token)
    copy.chat_template = template
    return copy
