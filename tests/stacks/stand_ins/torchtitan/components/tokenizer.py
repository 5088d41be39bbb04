"""The tokenizer that a loader is given."""


class BaseTokenizer:
    pass
