"""Log-probabilities of the trained tokens of a batch without all of its logits, to make losses over documents of.

    model(**batch) -> hidden states -> output layer, a chunk at a time -> log-probability (and entropy) of each label
                                                                       -> reduce(..., batch, "sum"): one per document

The model is called as :func:`torch_backend.losses.causal_lm.causal_lm_loss` calls it, and what that refuses is refused.
Where documents are cut over ranks, each rank computes those of its own tokens, and every rank gets those of the whole
batch: a few numbers for each token, never logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from packing_core.batches.keys import BatchKey
from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import LayoutError, PackingError
from torch_backend.hf.patch import context_of, cut_over_ranks
from torch_backend.losses.causal_lm import Shortcut, call_with_shortcut, loss_in
from torch_backend.losses.next_tokens import next_tokens_of
from torch_backend.losses.output_layer import Tail, most_likely, output_layer_logprobs
from torch_backend.segments import to_device

DIFFERENT_OPTIONS = (
    "the ranks of a context-parallel group call token_logprobs with different options or candidates: pass the same on "
    "all of them"
)


class TokenLogprobs(NamedTuple):
    """Predictions of a model for the labels of a batch. All but ``auxiliary`` stand at the label's own token.

    Attributes:
        logprobs: float32 [B, S]: ``log p(label at t | the tokens of its document before t)``; 0 where nothing is
            trained (labels of -100, so at the first token of every document and in padding).
        entropy: float32 [B, S] in nats, of the distribution from which ``logprobs`` took the label; None if not asked.
        candidates: int64 [B, S, K]: the most likely ids, or those that were asked for; None if none were.
        candidate_logprobs: float32 [B, S, K], their log-probabilities; None likewise.
        auxiliary: float32 scalar: the term that the model adds to its own loss (a router's auxiliary loss under
            ``output_router_logits``, with the model's coefficient), else 0. To be added to a loss that is a mean.
    """

    logprobs: Tensor
    entropy: Tensor | None
    candidates: Tensor | None
    candidate_logprobs: Tensor | None
    auxiliary: Tensor


def token_logprobs(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    top_k: int | None = None,
    candidates: Tensor | None = None,
) -> TokenLogprobs:
    """Computes the log-probability of each trained token, differentiable, in chunks of logits.

    No tensor [tokens, vocabulary] ever exists: the backward computes the logits of each chunk again.

    On a model that was patched with a mesh, every rank of it passes the same whole batch and options and gets the
    values of the whole batch. If every rank computes the same loss of them, gradients that are averaged over the ranks
    are those of one process.

    Args:
        model: a transformers causal language model or a wrapper of one (DDP, FSDP, PEFT, a compiled or prepared model),
            patched if the batch is packed. Pass the outermost wrapper, because this is what gets called.
        batch: keyword arguments of the model, with ``labels`` int64 [B, S], unshifted, -100 where nothing is trained.
        temperature: divides the model's logits, after whatever scale and softcap the model has.
        entropy: also that of each distribution.
        top_k: also the k most likely ids at each trained token, and their log-probabilities.
        candidates: int64 [B, S, K]: also the log-probabilities of these ids at each trained token, such as those that a
            teacher found most likely.

    Raises:
        LayoutError: the batch has no labels, or has them shifted; or shapes contradict each other; or the ranks of a
            mesh have different batches, options or candidates (on a GPU an assertion on the device fails instead).
        PackingError: the temperature is not above 0, or both ``top_k`` and ``candidates`` are given.
        UnsupportedModelError: the batch is packed and the model is not patched; the logits are not those of one output
            layer, a scale and a softcap; the loss does not come from ``loss_function``; ZeRO-3 partitions the output
            layer; or the batch has shared prefixes and the model a mesh.
        UnsupportedError: the batch cannot be cut over the ranks of the model's mesh.

    >>> import torch_backend  # doctest: +SKIP
    >>> found = torch_backend.token_logprobs(model, batch)
    >>> torch_backend.reduce(found.logprobs, batch, "sum")  # one per document, in source order
    """
    if not temperature > 0:
        raise PackingError(f"temperature must be above 0, got {temperature}: for the most likely ids pass top_k")
    if top_k is not None and candidates is not None:
        raise PackingError("top_k chooses candidates by the model and candidates names them: pass one of them")
    if top_k is not None and top_k < 1:
        raise PackingError(f"top_k must be at least 1, got {top_k}")
    if batch.get("shift_labels") is not None:
        raise LayoutError("token_logprobs takes labels as they stand with the tokens: leave shift_labels out")
    labels = batch.get("labels")
    if candidates is not None and labels is not None and candidates.shape[:-1] != labels.shape:
        raise LayoutError(f"candidates must be [*{list(labels.shape)}, K], got {list(candidates.shape)}")
    found: TokenLogprobs = _token_logprobs(model, batch, temperature, entropy, top_k, candidates)
    return found


@torch.compiler.disable  # it exchanges modules; a compiled model inside is compiled all the same
def _token_logprobs(
    model: nn.Module,
    batch: Mapping[str, Any],
    temperature: float,
    entropy: bool,
    top_k: int | None,
    candidates: Tensor | None,
) -> TokenLogprobs:
    part, context = cut_over_ranks(model, batch), context_of(model)
    pairs = next_tokens_of(part)
    if context is not None and (share := part.get(BatchKey.SHARE)) is not None:
        wanted = torch.empty(0, device=share.device) if candidates is None else to_device(candidates, share.device)
        context.require_same((temperature, entropy, top_k or 0, *wanted.shape), wanted, message=DIFFERENT_OPTIONS)

    def of_labels(shortcut: Shortcut, hidden: Tensor, tail: Tail, labels: Tensor, _: Tensor | None) -> Any:
        """A loss of 0, and log-probabilities, entropies and ids, which stand here at the token that predicts."""
        head, entries, hidden = shortcut.head, shortcut.entries, pairs.hidden(hidden)
        ids = targets = pairs.targets(labels).to(hidden.device)[..., None]
        if top_k is not None:
            ids = torch.cat([targets, most_likely(head, hidden, top_k, entries=entries).to(hidden.device)], -1)
        elif candidates is not None:
            ids = torch.cat([targets, pairs.candidates(candidates.to(hidden.device))], -1)
        ids = torch.where(targets == IGNORE_INDEX, IGNORE_INDEX, ids)
        logprobs, entropies = output_layer_logprobs(
            head, hidden, ids, tail=tail.at_temperature(temperature), entries=entries, entropy=entropy
        )
        loss = torch.where(torch.zeros_like(logprobs, dtype=torch.bool), logprobs, 0).sum()
        return loss, (logprobs, entropies, ids)

    output, (logprobs, entropies, ids) = call_with_shortcut(model, part, of_labels, caller="token_logprobs")
    auxiliary = loss_in(output)
    # Wrappers prepare their backward when the gradient of the model's output arrives, so this sends it zeros.
    logprobs = torch.where(torch.ones_like(logprobs, dtype=torch.bool), logprobs, auxiliary.to(logprobs.device))
    shape = batch["labels"].shape
    logprobs = pairs.at_labels(logprobs, shape)
    has_candidates = logprobs.shape[-1] > 1
    return TokenLogprobs(
        logprobs[..., 0],
        pairs.at_labels(entropies, shape) if entropy else None,
        pairs.at_labels(ids[..., 1:].clamp(min=0), shape) if has_candidates else None,
        logprobs[..., 1:] if has_candidates else None,
        auxiliary,
    )
