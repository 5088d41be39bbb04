"""NEFTune's noise by document: its size follows the length of a token's document, as without packing.

The noise of Jain et al. (https://arxiv.org/abs/2310.05914) is uniform up to ``alpha / sqrt(L * D)`` for a sequence of L
embeddings of D channels. Transformers takes L from the shape of a batch, which packed is the length of a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from packing_core.extras import require
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.patch import state_of

require("transformers", extra="hf")

from transformers import TrainerCallback  # noqa: E402


class DocumentNoise(TrainerCallback):
    """Adds noise to the embeddings of a patched model while a trainer trains.

    Args:
        model: of the trainer.
        alpha: ``neftune_noise_alpha``.
    """

    def __init__(self, model: nn.Module, alpha: float) -> None:
        self.root = causal_lm(model)
        self.alpha = alpha
        self._hook: Any = None

    def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.root = self.root if model is None else causal_lm(model)  # model_init may have made another one
        self._hook = self.root.get_input_embeddings().register_forward_hook(self._add)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._hook.remove()

    def _add(self, module: nn.Module, _: Any, embedded: Tensor) -> Tensor:
        """The embeddings [B, S, D] with noise, in training."""
        if not module.training:
            return embedded
        state = state_of(self.root)
        forward = None if state is None else state.current()
        rows, tokens, channels = embedded.shape
        if forward is None:
            lengths = torch.full((rows, tokens), tokens, device=embedded.device)
        else:
            segments = forward.segments
            lengths = segments.cu_seqlens.diff()[segments.seq_idx].to(embedded.device).view(rows, tokens)
        size = self.alpha / (lengths * channels).sqrt()
        return embedded + torch.empty_like(embedded).uniform_(-1, 1) * size[..., None].to(embedded.dtype)


def add_noise_by_document(trainer: Any) -> None:
    """Let a trainer's NEFTune follow the lengths of documents."""
    if trainer.neftune_noise_alpha is not None:
        trainer.add_callback(DocumentNoise(trainer.model, trainer.neftune_noise_alpha))
        trainer.neftune_noise_alpha = None  # or transformers would add its own
