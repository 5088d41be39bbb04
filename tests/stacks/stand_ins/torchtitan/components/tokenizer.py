"""The tokenizers that a loader is given."""


class BaseTokenizer:
    pass


class MultiModalTokenizer(BaseTokenizer):
    TOKEN_FIELDS = ("image", "video", "vision_start", "vision_end", "pad")
