"""The vocabulary of declarations: levels of the suite, options of each method, a backend's `Capabilities`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from packing_core.errors import PackingError

DTYPES = ("float32", "bfloat16", "float16")

# Far above the usual 1e-8, under which AdamW turns gradients of the size of a rounding error into whole steps.
ADAMW_EPSILON = 1e-3

# level -> the methods by which a backend takes part in it
LEVELS: dict[str, tuple[str, ...]] = {
    "collator": ("plan", "collate"),
    "operation": (
        "attention",
        "rope",
        "scan",
        "delta_rule",
        "ssd",
        "convolution",
        "clips",
        "index_loss",
        "experts",
        "loss",
        "reduce",
    ),
    "model": ("forward", "gradients", "logprobs", "embed", "shared_gradients", "context_gradients"),
    "trainer": ("train", "preference"),
}

# method -> what a backend may declare or leave out: the name in `Capabilities.options`, and what it stands for
OPTIONS: dict[str, dict[str, str]] = {
    "plan": {
        "first_fit": 'strategy="first_fit"',
        "sequential": 'strategy="sequential"',
    },
    "collate": {"capacity": "rows of at most `capacity` tokens, instead of all documents in one row"},
    "attention": {
        "bidirectional": "causal=False",
        "window": "window=W",
        "softcap": "softcap=C",
        "sinks": "sinks=[H]",
        "alibi": "alibi_slopes=[H]",
        "gqa": "fewer key/value heads than query heads",
        "narrow_values": "values narrower than keys",
        "both_ways": "spans=[B, S], tokens that see one another in both directions",
        "selected_keys": "top_k=K, the keys that an indexer scores highest",
        "selected_blocks": "index_block=N, keys that are selected in blocks",
        "context_parallel": "context_ranks above 1",
        "arbitrary_ids": "segment ids that are any positive numbers; a promise",
        "nonfinite_padding": "NaN and Inf may stand at padding; a promise",
    },
    "rope": {"interleaved": "interleaved=True", "partial": "fewer channels turned than there are"},
    "scan": {},
    "delta_rule": {
        "grouped_values": "fewer heads of q and k than of v",
        "channel_decay": "g=[B, S, H, D], a decay for each key channel (Kimi Delta Attention)",
        "normalise": "normalise=True",
        "continued_segments": "parents=[N], segments that go on from the end of others",
    },
    "ssd": {"continued_segments": "parents=[N], segments that go on from the end of others"},
    "convolution": {"continued_segments": "parents=[N], segments that go on from the end of others"},
    "clips": {},
    "index_loss": {},
    "experts": {
        "biased_experts": "up_bias=[E, O] and down_bias=[E, D]",
        "clamped_experts": "an activation with a limit (gpt-oss)",
        "ungated_experts": "an activation without gates",
    },
    "loss": {"token_weights": "token_weights=[B, S]"},
    "reduce": {},
    "forward": {
        "drawn_batches": "batches that the suite laid out (native None), where the backend has a collator of its own",
        "sliding_window": "a decoder with sliding_window",
        "dynamic_rope": "a decoder with dynamic_rope_factor",
    },
    "gradients": {"untrained_batches": "a batch without any target; a promise"},
    "logprobs": {"temperature": "temperature other than 1"},
    "embed": {},
    "shared_gradients": {"shared_prefixes": "documents whose common beginnings are computed once"},
    "context_gradients": {"cut_documents": "documents that are cut over ranks"},
    "train": {
        "adamw": 'optimizer="adamw"',
        "ranks": "ranks above 1",
        "mixed_precision": 'a dtype other than "float32"',
        "untrained_batches": "a step without any target; a promise",
    },
    "preference": {},
}
# Options about values, not arguments: a backend that leaves one out is not given such values, and refuses nothing.
PROMISES = frozenset({"arbitrary_ids", "nonfinite_padding", "untrained_batches"})
ALL_OPTIONS = frozenset(option for options in OPTIONS.values() for option in options)


@dataclass(frozen=True)
class Capabilities:
    """The declaration of a backend. A request outside of it must raise `UnsupportedError`; the suite asks, and checks.

    Attributes:
        dtypes: working dtypes, out of `DTYPES`.
        options: what it serves out of `ALL_OPTIONS`.
        head_dims: widths D that attention and the delta rule serve, as a range or any collection of ints.
        interpreted: runs in an interpreter (Triton's, Pallas's), so the suite draws a reduced selection and says so.
        atomic_backward: backward passes add with atomics, so their isolation is judged by the noise of running twice,
            not bitwise. The forward is bitwise for everybody.
        atomic_embedding: a model's gradients add with atomics although those of attention do not (on a GPU, the
            scatter-add of an embedding's gradient), so `gradients` and `train` are judged by the noise of reruns.
        own_model: `forward`, `gradients` and `train` use a model of their own and ignore the suite's `Decoder`; the
            oracle is then that same model in "float64", one document at a time, which these methods must serve.
        words: number of token ids that an own model knows, at least 64.
        longest: tokens of the longest document that an own model takes, at least 96.

    Raises:
        PackingError: a dtype or an option is unknown.
    """

    dtypes: tuple[str, ...] = DTYPES
    options: frozenset[str] = ALL_OPTIONS
    head_dims: Collection[int] = field(default=range(1, 513))
    interpreted: bool = False
    atomic_backward: bool = False
    atomic_embedding: bool = False
    own_model: bool = False
    words: int = 64
    longest: int = 1024

    def __post_init__(self) -> None:
        for what, names, known in (("dtype", self.dtypes, DTYPES), ("option", self.options, ALL_OPTIONS)):
            unknown = sorted(set(names) - set(known))
            if unknown:
                raise PackingError(f"no {what} {', '.join(unknown)}: declare some of {', '.join(sorted(known))}")
        object.__setattr__(self, "options", frozenset(self.options))

    def refusal(
        self, *, dtype: str | None = None, options: Collection[str] = (), head_dim: int | None = None
    ) -> str | None:
        """Explains why a request exceeds the declared capabilities; None when it is declared."""
        if dtype is not None and dtype not in self.dtypes and not (self.own_model and dtype == "float64"):
            return f"dtype {dtype} is not declared, only {', '.join(self.dtypes)}"
        undeclared = sorted(set(options) - self.options)
        if undeclared:
            return f"{', '.join(undeclared)} not declared"
        if head_dim is not None and head_dim not in self.head_dims:
            return f"head_dim {head_dim} is not declared, only {self.head_dims}"
        return None
