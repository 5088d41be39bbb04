"""Wrong keywords in, the right ones out: what other packers call the arguments of ``plan``, ``pack`` and the others.

``hinted`` wraps a function without changing its signature, so editors and type checkers see the real one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from packing_core.errors import KeywordError

P = ParamSpec("P")
R = TypeVar("R")

# our argument -> what it is called elsewhere (TRL, axolotl, Unsloth, LLaMA-Factory, torchtune, MaxText, grain, torch)
_CALLED = {
    "capacity": (
        "max_length max_seq_length max_seq_len max_target_length seq_len seq_length sequence_len sequence_length "
        "cutoff_len block_size bin_capacity bin_size pack_length packed_length row_length length_struct max_tokens"
    ),
    "pad_id": "pad_token_id pad_token padding_idx padding_value padding_id pad",
    "overflow": "truncation truncate split split_across_pack drop_long drop_too_long on_overflow overflow_strategy",
    "context": "stride overlap overlap_size chunk_overlap overlap_tokens doc_stride context_tokens",
    "min_piece": "min_len min_length min_chunk_size min_tokens min_piece_length",
    "strategy": "packing_strategy pack_strategy method algorithm packing_method sample_packing_sequentially",
    "max_segments": (
        "sample_packing_bin_size max_segments_per_seq max_sequences_per_bin max_segments_per_bin max_docs "
        "max_documents max_seqs max_packed_sequences"
    ),
    "order": "curriculum length_curriculum sort sorted grouped sort_by_length group_by_length",
    "keys": "key group_by group_key sort_key sort_by groups topics",
    "buffer": "buffer_size sample_packing_group_size group_size num_packing_bins window shuffle_buffer prefetch",
    "seed": "shuffle shuffle_seed random_seed random_state shuffle_rows shuffle_bins",
    "shard": "num_shards shard_index shard_id rank world_size num_replicas process_index process_count",
    "world_size": "num_replicas num_ranks ranks n_ranks num_processes dp_size num_shards shards",
    "rows_per_step": "batch_size per_device_batch_size per_device_train_batch_size rows_per_rank micro_batch_size",
    "cost": "cost_fn weights weight",
    "loss_mask": "completion_mask assistant_masks assistant_mask train_mask target_mask",
    "prompt_lengths": "prompt_length prompt_lens prompt_len completion_start",
    "weighting": "loss_weighting loss_weights",
    "columns": "extra_columns other_columns features meta_features",
    "lengths": "seq_lens seqlens seq_lengths sequence_lengths",
    "sequences": "documents dataset input_ids examples",
    "source": "dataset documents iterable sequences",
}
SWITCHES = (
    "sample_packing",
    "eval_sample_packing",
    "neat_packing",
    "sequence_packing",
    "use_packing",
    "packing",
)  # of packing itself
NO_SWITCH = "leave it out, documents are packed in any case"
_NEEDLESS = {  # the reason why there is no such argument -> what it is called elsewhere
    "since 0.3 documents start anywhere in a row; choose a capacity that suits your kernels": "alignment",
    'since 0.3 strategy="best_fit" is the tightest': "effort",
    "labels are padded with -100": "label_pad_id label_pad_token_id label_pad ignore_index",
    "every batch has them: batch.cu_seqlens, .lengths, .segment_ids, .position_ids and .attention_mask": (
        "return_boundaries return_position_ids return_seq_idx return_flash_attn_kwargs return_attention_mask "
        "return_segment_ids reset_position_ids"
    ),
    "take what you need from the batch: to_dict(), kernel_view() or padding_free()": "return_tensors padding_free",
    "no row is left out; skip those that you do not want": "drop_last drop_remainder",
    "rows are always padded to the capacity": "padding pad_to_max_length pad_to_multiple_of multiple_of",
    "iterate again for another epoch": "epochs num_epochs",
    "rows are made where they are read, so a DataLoader's workers make them": "num_workers num_proc",
}
_HOW = {
    "seed": "an integer shuffles, None keeps the order",
    "overflow": '"error", "truncate", "split", "overlap", "restart" or "drop"',
    "shard": "(index, count)",
    "order": '"curriculum", "sorted", "grouped" or "weighted"',
    "strategy": '"mixed", "best_fit", "first_fit" or "sequential"',
}


def hinted(*options_of: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: unknown keywords raise an error that names the right one.

    So do values by position beyond those that the function takes so.

    Args:
        options_of: functions whose keyword-only arguments the decorated one hands on.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__qualname__.removesuffix(".__init__")
        own = inspect.signature(function).parameters.values()
        known = [one.name for one in own if one.kind != one.VAR_KEYWORD and one.name != "self"]
        positional = [one.name for one in own if one.kind == one.POSITIONAL_OR_KEYWORD]
        for other in options_of:
            options = inspect.signature(other).parameters.values()
            known += [one.name for one in options if one.kind == one.KEYWORD_ONLY]

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for keyword in kwargs:
                if keyword not in known:
                    raise KeywordError(f"{name}() has no argument {keyword!r}: {_way_out(keyword, known)}")
            if len(args) > len(positional):
                taken = [one for one in positional if one != "self"]
                named = ", ".join(f"{one}=" for one in known if one not in taken)
                raise KeywordError(
                    f"{name}() takes {', '.join(taken)} by position and got {args[len(positional)]!r} beside: name the "
                    f"argument that it is of {named}"
                )
            return function(*args, **kwargs)

        return checked

    return decorate


def names_here(name: str) -> list[str]:
    """Returns the arguments that other packers call by this name, or that have it here.

    >>> names_here("max_length")
    ['capacity']
    """
    return [ours for ours, others in _CALLED.items() if name == ours or name in others.split()]


def _way_out(keyword: str, known: list[str]) -> str:
    """Suggests what to pass instead of ``keyword`` to a function with the arguments ``known``."""
    spelt = keyword.lower()
    if spelt in SWITCHES:
        return NO_SWITCH
    for reason, others in _NEEDLESS.items():
        if spelt in others.split():
            return f"leave it out, {reason}"
    for ours in names_here(spelt):
        right = "capacity_or_plan" if ours == "capacity" and "capacity_or_plan" in known else ours
        if right in known:
            return f"pass {right}={f', {_HOW[right]}' if right in _HOW else ''}"
    close = get_close_matches(spelt, known, 1)
    return f"pass {close[0]}=" if close else f"it has {', '.join(known)}"
