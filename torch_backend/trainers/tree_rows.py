"""TRL's AsyncGRPOTrainer on this project's attention: its rows are trees of samples and name the function they need.

    TRL's row: the places of the keys that each segment sees, and boundaries -> the segments and their parents, read
    from the device once for each row -> packed attention of every layer

So its rows run where TRL's kernel does not, on a CPU and on any GPU. Packing of samples, loss and metrics stay TRL's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from packing_core.errors import UnsupportedError, UnsupportedModelError
from torch_backend.hf.anatomy.model import Anatomy, anatomy_of
from torch_backend.hf.anatomy.random_draws import find_draw
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.attention import packed_attention
from torch_backend.hf.explaining import Explanation, explain_attention
from torch_backend.hf.forward import Choice, PackedForward
from torch_backend.hf.inputs.forests import why_no_attention, why_no_forest
from torch_backend.segments import PackedMetadata
from torch_backend.trainers.changes import Changes
from torch_backend.trainers.port import TrainerPort

TREE_ATTENTION = "tree_fa3"  # the name under which TRL registers its function and builds its models


class TreeRows:
    """Runs the attention of an AsyncGRPOTrainer's rows, and says for ``explain(trainer)`` by what."""

    def __init__(self, anatomy: Anatomy, implementation: str | tuple[str, ...]) -> None:
        self.anatomy = anatomy
        self.implementation = implementation
        self.choices: dict[int, Choice] = {}
        self.rows: Any = WeakTensorKeyDictionary()  # the keys of a row -> its PackedForward

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *,
        tree_kv_index: Tensor,
        tree_cu_seqlens_q: Tensor,
        tree_cu_seqlens_k: Tensor,
        tree_max_seqlen_q: int,
        tree_max_seqlen_k: int,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The function that layers call under TRL's name; arguments and results as of TRL's ``tree_attention``."""
        if (forward := self.rows.get(tree_kv_index)) is None:
            segments = segments_of(tree_kv_index, tree_cu_seqlens_q, tree_cu_seqlens_k)
            forward = PackedForward(segments, (1, segments.tokens), self.implementation)
            self.rows[tree_kv_index], self.choices = forward, forward.choices
        return packed_attention(module, query, key, value, forward, before=TREE_ATTENTION, **options)

    def explanation(self) -> Explanation:
        layers = [
            explain_attention(name, self.choices.get(id(layer)), self.implementation)
            for name, layer in self.anatomy.layers.items()
        ]
        return Explanation(layers, ["the trainer's own rows share prefixes; their attention is crosspack's"])


def segments_of(kv_index: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> PackedMetadata:
    """The segments of a tree row with their parents.

    Args:
        kv_index: int [K] the places of the keys that each segment sees: those of its path from the root, in order.
        cu_seqlens_q, cu_seqlens_k: int [S + 1] boundaries of the segments, and of their paths in ``kv_index``.
    """
    places, starts, ends = (x.cpu().numpy().astype(np.int64) for x in (kv_index, cu_seqlens_q, cu_seqlens_k[1:]))
    lengths = np.diff(starts)
    before = ends - lengths  # behind the last key of a segment's ancestors
    has = np.diff(ends, prepend=0) > lengths
    last = places[np.where(has, before - 1, 0)]  # the place of that key
    parents = np.where(has, np.searchsorted(starts, last, side="right") - 1, -1)
    return PackedMetadata.from_lengths(lengths.tolist(), device=kv_index.device, parents=parents.tolist())


class TreePort(TrainerPort):
    """Packing in TRL's ``AsyncGRPOTrainer``, whose rows ask for attention by a name."""

    def plan(self) -> None:
        request, root = self.request, causal_lm(self.trainer.model)
        idle = dict(request.rows)
        idle |= {name: x for name in ("memory", "precision") if (x := getattr(request, name)) is not None}
        idle |= {"share_prefix": False} if request.share_prefix is False else {}
        replace(request, rows=idle).refuse(f"{self.name} makes its rows itself and shares their prefixes")
        if root.config.get_text_config()._attn_implementation != TREE_ATTENTION:
            raise UnsupportedError(f"{self.name} of this TRL has no tree rows: install trl 1.16 or newer")
        self.anatomy = anatomy_of(root)
        device = next(root.parameters()).device
        reason = why_no_forest(self.anatomy) or why_no_attention(device, request.implementation)
        if self.anatomy.mixers:
            reason = "TRL hands its trees to attention layers alone, and it has recurrent ones"
        if reason is None and (draw := find_draw(root, ever=True)) is not None:
            reason = f"{draw} may be on in training, and samples that share a prefix would share what it draws"
        if reason is not None:
            raise UnsupportedModelError(f"{type(root).__name__} cannot run the tree rows of {self.name}: {reason}")

    def install(self, changes: Changes) -> None:
        names = self.request.implementation
        rows = TreeRows(self.anatomy, names if isinstance(names, str) else tuple(names))
        changes.put(ALL_ATTENTION_FUNCTIONS, TREE_ATTENTION, rows.attention)
        changes.set("packed_step", rows)

    @staticmethod
    def uninstall(trainer: Any) -> None:
        """Nothing: the model was not patched."""
