"""Overrides for torchtitan: its varlen attention and its dataloader, replaced by ``--override.imports``.

``packed_rows`` -> :class:`PackedDataLoader` packs documents into rows, whose positions restart with every document ->
torchtitan makes its ``VarlenMetadata`` of the positions -> ``packed_attention`` -> :class:`PackedAttention` reads that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer, MultiModalTokenizer
from torchtitan.config import derive, override
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata

import crosspack
from packing_core.batches.columns import READ, documents_of
from packing_core.batches.keys import BatchKey
from packing_core.errors import LayoutError, PackingError, UnsupportedError

_READ = ("input_ids", "labels", *READ)  # of a record; torchtitan takes no other columns


class PackedAttention(VarlenAttention):
    """torchtitan's varlen attention through ``crosspack.attention``, in the dtype of its inputs, on any device."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """Options of torchtitan's varlen attention."""

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of the tokens of each document among themselves, [B, L, N, H] -> [B, L, N, Hv].

        Raises:
            UnsupportedError: the layer reads the log-sum-exp of its logits, is captured, or compiled without Triton.
            LayoutError: the documents of ``attention_masks`` do not cover the tokens.
        """
        if out_transform is not None:
            raise UnsupportedError(
                "this layer changes its output by the log-sum-exp of the logits (out_transform), which is not returned "
                "here: leave packed_attention out, and torchtitan's varlen attention reads the same documents"
            )
        if q_BLNH.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "segments are read outside of CUDA graphs, this layer is captured: set --training.disable_cuda_graphs"
            )
        rows, length = q_BLNH.shape[:2]
        left, right = self.window_size
        out = crosspack.attention(
            q_BLNH.flatten(0, 1),
            k_BLNH.flatten(0, 1),
            v_BLNH.flatten(0, 1),
            segments_of(attention_masks, rows, length),
            causal=right == 0,
            window=None if left < 0 else left + 1,  # torchtitan's does not count the query itself
            scale=scale,
            implementation="triton" if torch.compiler.is_compiling() else "auto",  # in a graph, without a break
        )
        return out.unflatten(0, (rows, length))


_built: Any = WeakTensorKeyDictionary()  # boundaries of a batch -> its segments, which all layers share


def segments_of(masks: VarlenMetadata, rows: int, length: int) -> crosspack.PackedMetadata:
    """Returns the segments of rows [rows, length], whose boundaries torchtitan cuts at the end of every row."""
    if torch.compiler.is_compiling():  # a graph is for batches of any documents, of which none is longer than a row
        return crosspack.PackedMetadata(masks.cu_seq_q, length, rows * length)
    if masks.cu_seq_q not in _built:
        _built[masks.cu_seq_q] = crosspack.PackedMetadata(masks.cu_seq_q, masks.max_q, rows * length)
    return _built[masks.cu_seq_q]


@override(target=VarlenAttention.Config, description="packed attention of Crosspack")
def packed_attention(cfg: VarlenAttention.Config) -> PackedAttention.Config:
    """Replaces the varlen attention of every layer.

    Raises:
        UnsupportedError: the layer sees some tokens after the query, and not all of them.
    """
    if cfg.window_size[1] != 0 and cfg.window_size != (-1, -1):
        raise UnsupportedError(
            f"torchtitan's window_size={cfg.window_size} sees tokens after the query within a window: packed attention "
            "is causal (0 after the query), or sees all of a document: (-1, -1)"
        )
    return derive(cfg, PackedAttention.Config)


class _Documents:
    """The documents of a file, of which packed rows hold several; a text is encoded by torchtitan's tokenizer."""

    def __init__(self, path: str | PathLike[str], tokenizer: BaseTokenizer) -> None:
        self.path, self.tokenizer = path, tokenizer

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for record in crosspack.read(self.path):
            if record.get("input_ids") is not None:
                try:
                    yield from documents_of({name: record[name] for name in _READ if name in record})
                except PackingError as error:
                    raise error.reworded(f"{record.where}: {error}") from None
            elif record.get("text") is not None:
                yield {"input_ids": self.tokenizer.encode(record["text"], add_bos=True, add_eos=True)}
            else:
                raise LayoutError(
                    f"{record.where} has the columns {', '.join(record)}: a document has input_ids, or a text"
                )


class PackedDataLoader(ParallelAwareDataloader):
    """Rows of ``seq_len`` tokens for torchtitan's trainer, packed by ``crosspack.stream``, resumed by its checkpoints.

    Each batch is ``({"input": [B, L], "positions": [B, L]}, labels [B, L])``, with ``special_tokens`` of a multimodal
    tokenizer. Positions count from 0 in each document; labels are shifted, as torchtitan's are, and no document's last
    token has one.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """Options of the loader.

        Attributes:
            documents: a path that ``crosspack.read`` takes, or a source that ``crosspack.stream`` takes.
            options: of ``crosspack.stream``.
            infinite: whether to begin the next epoch at the end of one.
        """

        documents: Any = None
        options: dict[str, Any] = field(default_factory=dict)
        infinite: bool = True

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = 1,
        **kwargs: Any,
    ) -> None:
        given = config.documents
        if config.options.get("weighting", "token") != "token":
            raise UnsupportedError("torchtitan's loss counts every target alike: leave weighting= out of packed_rows")
        self.infinite = config.infinite
        self.of_every_batch: dict[str, Any] = {}
        if isinstance(tokenizer, MultiModalTokenizer):  # models with a vision encoder ask for them, of text too
            names = [f"{name}_id" for name in tokenizer.TOKEN_FIELDS]
            self.of_every_batch = {"special_tokens": {name: getattr(tokenizer, name) for name in names}}
        rows = crosspack.StreamedRows(
            _Documents(given, tokenizer) if isinstance(given, str | PathLike) else given,
            seq_len,
            batch_size=local_batch_size,
            shard=(dp_rank, dp_world_size),
            **config.options,
        )
        super().__init__(
            rows,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            batch_size=None,  # the rows come as batches
            num_workers=config.num_workers,
            persistent_workers=config.persistent_workers,
            pin_memory=config.pin_memory,
            prefetch_factor=config.prefetch_factor,
            snapshot_every_n_steps=snapshot_every_n_steps,
        )

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Yields batches, of one epoch unless ``infinite``."""
        while True:
            for batch in super().__iter__():
                inputs, labels = _torchtitan_batch(batch)
                yield inputs | self.of_every_batch, labels
            if not self.infinite:
                return


def _torchtitan_batch(batch: Mapping[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    ids, labels = batch["input_ids"], batch["labels"]
    # padding counts as segments in packed_lengths, and every token of it would be a document in position_ids
    positions = crosspack.PackedMetadata.from_lengths(batch[BatchKey.LENGTHS]).position_ids
    ids = ids.as_subclass(Tensor)  # torchtitan's own models keep documents apart, by their positions
    return {"input": ids, "positions": positions.long().view_as(ids)}, crosspack.next_token_targets(labels)


@override(target=BaseDataLoader.Config, fqns=["dataloader"], description="rows packed by Crosspack")
def packed_rows(cfg: BaseDataLoader.Config, *, documents: Any, **options: Any) -> PackedDataLoader.Config:
    """Replaces the dataloader of training; validation keeps its own.

    Args:
        cfg: of torchtitan's loader, whose workers and ``infinite`` stay.
        documents: as in :class:`PackedDataLoader.Config`.
        options: of ``crosspack.stream``, such as ``overflow`` and ``seed``.
    """
    return derive(cfg, PackedDataLoader.Config, documents=documents, options=options)
