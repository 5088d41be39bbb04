"""TRL's AsyncGRPOTrainer on this project's attention: its rows are trees of samples and name the function they need.

    TRL's row: the places of the keys that each segment sees, and boundaries -> the segments and their parents, read
    from the device once for each row -> packed attention of every layer

So its rows run where TRL's kernel does not, on a CPU and on any GPU. Packing of samples, loss and metrics stay TRL's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from packing_core.errors import PackingError, UnsupportedError, UnsupportedModelError
from torch_backend.hf.anatomy.model import Anatomy, anatomy_of
from torch_backend.hf.anatomy.random_draws import find_draw
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.attention import packed_attention
from torch_backend.hf.explaining import Explanation, explain_attention
from torch_backend.hf.forward import Choice, PackedForward
from torch_backend.hf.inputs.forests import why_no_attention, why_no_forest
from torch_backend.segments import PackedMetadata

TREE_ATTENTION = "tree_fa3"  # the name under which TRL registers its function and builds its models


class TreeRows:
    """Runs the attention of an AsyncGRPOTrainer's rows, and says for ``explain(trainer)`` by what.

    Args:
        anatomy: of the model.
        implementation: of attention, as the user named it.
    """

    def __init__(self, anatomy: Anatomy, implementation: str | tuple[str, ...]) -> None:
        self.anatomy = anatomy
        self.implementation = implementation
        self.choices: dict[int, Choice] = {}
        self.rows: Any = WeakTensorKeyDictionary()  # the keys of a row -> its PackedForward
        self.before = ALL_ATTENTION_FUNCTIONS[TREE_ATTENTION]
        AttentionInterface.register(TREE_ATTENTION, self.attention)

    def withdraw(self) -> None:
        """Put the function back that was registered before."""
        AttentionInterface.register(TREE_ATTENTION, self.before)

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


def serve_tree_rows(trainer: Any, implementation: Any, idle: str | None) -> None:
    """Register this project's attention under the name that a trainer's tree rows ask for; see the module.

    Args:
        idle: an option of ``enable_packing`` that its caller set and that such a trainer does not have, as written.

    Raises:
        UnsupportedModelError: the model's attention or dropout would not be exact on shared tokens.
        UnsupportedError: the trainer's model was not built for tree rows.
        PackingError: an option has no effect.
    """
    name, root = type(trainer).__name__, causal_lm(trainer.model)
    if idle is not None:
        raise PackingError(
            f"{name} makes its rows itself and shares their prefixes, so {idle} has no effect: leave it out"
        )
    if root.config.get_text_config()._attn_implementation != TREE_ATTENTION:
        raise UnsupportedError(f"{name} of this TRL has no tree rows: install trl 1.16 or newer")
    anatomy = anatomy_of(root)
    reason = why_no_forest(anatomy) or why_no_attention(next(root.parameters()).device, implementation)
    if anatomy.mixers:
        reason = "TRL hands its trees to attention layers alone, and it has recurrent ones"
    if reason is None and (draw := find_draw(root, ever=True)) is not None:
        reason = f"{draw} may be on in training, and samples that share a prefix would share what it draws"
    if reason is not None:
        raise UnsupportedModelError(f"{type(root).__name__} cannot run the tree rows of {name}: {reason}")
    names = implementation if isinstance(implementation, str) else tuple(implementation)
    if hasattr(trainer, "packed_step"):
        trainer.packed_step.withdraw()
    trainer.packed_step = TreeRows(anatomy, names)
