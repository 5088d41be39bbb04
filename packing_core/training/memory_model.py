"""The device memory of a training step, by a formula: what each level of memory keeps for a token.

A config -> sizes (:mod:`.decoder_sizes`) -> bytes that do not depend on the row (weights, gradients, optimizer) and
bytes for a token at each level -> the longest row that fits a device, and the fastest level at which a row does. It
holds for compiled layers of attention (plain or latent), the gated delta rule, Mamba-2 or RG-LRU, with or without
experts, whose attention keeps no scores, and a loss that holds no logits.

Where the figures come from: for a token and layer of width D, queries Q, keys and values K and V, attention output O
and an MLP of W inner columns (both halves of a gated one), the backward reads

    "none"       inputs of the norms 2 D, rotated queries and keys Q + K, V, O, the MLP's inner columns W
    "selective"  2 D + Q + K + V + O, and W where each half of the MLP is at most twice as wide as the model
    "attention"  D + O, and the keys of latent attention
    "full"       the layer's input D
    "offload"    D of two layers: of this one, and of the next on its way back from the host

and, but for "full" and "offload", the softmax statistics, 4 bytes a head. Norms of queries and keys read those before
the rotation too, from which "selective" makes the others; norms behind attention and MLP the input of the latter, and
other mixers what their sizes say. Most is held at one of three times:

    in the loss      what all layers keep, hidden states before and after the last norm and their gradient, a chunk of
                     logits, and the sum of the output layer's gradient in float32
    at the last layer's gradients    what all layers keep, one hidden state, and what one layer holds while it computes
                     its gradients
    at the first layer's             what one layer keeps and holds, and all gradients

While a layer computes its gradients it holds what it recomputed, and either three columns in place of each inner one
(halves, their product and the gradients of these; with adapters in the MLP their products too) or the gradients of O,
queries, keys and values. In long rows the MLP, or the experts, hold a tile of these, and a norm and what reads it a
tile of what it returns. Experts keep their first product at "selective", in rows of any length.
Figures that this was compared with: benchmarks/RESULTS.md, levels of memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from packing_core.planning.model_sizes import ConfigReader
from packing_core.training.decoder_sizes import LEVELS_OF_TILES, DecoderSizes, FeedForward, LayerSizes, Part

GIB = 2**30
LEVELS = ("none", "selective", "attention", "full", "offload")  # the fastest first
USABLE = 0.95  # of a device: its own context, and what the allocator cannot use

# Chunks of the loss take a seventh of all logits, within these bounds: few sums in float32 where rows are long, and
# little memory beside the activations where they are not. Each chunk reads and writes the gradient of the weight once.
_CHUNKS, _LEAST_BYTES, _MOST_BYTES = 7, 2**29, 2**31
# Rows from this length on compute MLPs, projections and experts by tiles of so many tokens, where they are recomputed
# and do not fit without.
TILED_FROM, TILE = 65_536, 8_192
_ON_THEIR_WAY = 2  # inputs of layers that offloading holds on the device: the last two to leave, or to come back
_BESIDE_THEM = 1  # hidden states beside what layers keep at the last one, as the allocator's history shows
_WORKSPACES = 144 * 2**20  # of the libraries of matrix products, on the streams of a step


def loss_chunk(tokens: int, row_bytes: int) -> int:
    """Returns the bytes of logits that the loss computes at a time; ``row_bytes``: the logits of a token."""
    total = tokens * row_bytes
    whole = total if total <= 1.5 * _LEAST_BYTES else 0  # a small second chunk would read and write all sums again
    return min(max(total // _CHUNKS, _LEAST_BYTES, whole), _MOST_BYTES)


@dataclass(frozen=True)
class MemoryModel:
    """The memory of a step with one row of so many tokens, in bytes.

    Attributes:
        fixed: weights, gradients and states of the optimizer.
        gradients: of these, the gradients, which the first microbatch of a step makes in its backward.
        kept: at each level, what all layers keep for a token.
        work: at each level, what one layer holds beside that for a token while it computes its gradients.
        tiled: as ``work`` in rows whose MLPs, projections or experts are computed by tiles, without these; empty where
            none are.
        tile: of a layer, for a tile of its MLP or experts and the sums of their weights' gradients.
        behind_experts: of a token, what the norm in front of experts holds in its backward where they are computed by
            tiles, when no tile is held any more.
        hidden: of a token, one hidden state: the input of a layer.
        logits: of a token, in the dtype of the activations.
        layers: number of layers.
        head: the gradient of the output layer, if it is trained.
        head_sum: the sum of that gradient over chunks of logits, in float32.
        accumulates: whether gradients of earlier microbatches are there from the beginning.
    """

    fixed: int
    kept: Mapping[str, int]
    work: Mapping[str, int]
    hidden: int
    logits: int
    layers: int
    gradients: int = 0
    head: int = 0
    head_sum: int = 0
    tiled: Mapping[str, int] = field(default_factory=dict)
    tile: int = 0
    behind_experts: int = 0
    accumulates: bool = False

    @property
    def host(self) -> int:
        """Returns the bytes of a token on the host where ``"offload"`` keeps the input of every layer there."""
        return self.layers * self.hidden

    def group(self, tokens: int, host_bytes: int | None = None) -> int | None:
        """Returns how many layers share one input on the host at ``"offload"``, None if the host cannot hold one.

        With more than one, the inputs of the others are recomputed from it before their backward.
        """
        fit = self.layers if host_bytes is None else min(self.layers, host_bytes // (tokens * self.hidden))
        return None if fit < 1 else -(-self.layers // fit)

    def bytes(self, level: str, tokens: int, *, group: int = 1, tiles: bool = True) -> int:
        """Returns the most that a step with ``tokens`` in its largest microbatch holds at a level.

        Args:
            group: of layers that share one input on the host at ``"offload"``.
            tiles: whether a long row is computed by tiles.
        """
        at_loss = at_last = tokens * self.kept[level]
        at_first = -(-at_loss // self.layers)
        work = tokens * self.work[level]
        if tiles and tokens >= TILED_FROM and level in self.tiled:
            work = tokens * self.tiled[level] + max(self.tile, tokens * self.behind_experts)
        if level == "offload":
            at_first = at_loss = min(self.layers, _ON_THEIR_WAY) * tokens * self.hidden
            at_last = max(at_loss, group * tokens * self.hidden)
        before = self.fixed if self.accumulates else self.fixed - self.gradients
        rows = min(tokens, -(-loss_chunk(tokens, self.logits) // self.logits // 128) * 128)
        loss = before + at_loss + 3 * tokens * self.hidden + rows * self.logits + self.head_sum
        at_last += _BESIDE_THEM * tokens * self.hidden
        work += tokens * self.hidden  # the gradient of the layer's output
        return _WORKSPACES + max(loss, before + self.head + at_last + work, self.fixed + at_first + work)

    def longest(self, level: str, device_bytes: int, host_bytes: int | None = None) -> int:
        """Returns the most tokens of a row, or of one document, that fit; 0 if none does.

        Args:
            device_bytes: what a device has, all of it; :data:`USABLE` of it is used.
            host_bytes: what can be page-locked on the host for ``"offload"``; None for any amount. Where it is not
                enough for the inputs of all layers, layers share them in groups.
        """
        # a row that is just long enough for tiles may fit where shorter ones do not
        low, high = 0, 1
        if level in self.tiled and self._fits(level, TILED_FROM, device_bytes, host_bytes):
            low, high = TILED_FROM, TILED_FROM + 1
        while self._fits(level, high, device_bytes, host_bytes):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(level, middle, device_bytes, host_bytes) else (low, middle)
        return low

    def fastest(self, tokens: int, device_bytes: int, host_bytes: int | None = None) -> str | None:
        """Returns the fastest level at which a row of ``tokens`` fits, None if there is none."""
        return next((level for level in LEVELS if self._fits(level, tokens, device_bytes, host_bytes)), None)

    def _fits(self, level: str, tokens: int, device_bytes: int, host_bytes: int | None) -> bool:
        group = self.group(tokens, host_bytes) if level == "offload" else 1
        return group is not None and self.bytes(level, tokens, group=group) <= USABLE * device_bytes

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        fixed: int | None = None,
        rank: int | None = None,
        states: int = 2,
        itemsize: int = 2,
        adapted: int | None = None,
        adapts_mlp: bool | None = None,
        gradients: int | None = None,
        head: bool | None = None,
        tiles: Collection[Part] | None = None,
    ) -> MemoryModel:
        """Returns the memory of training a decoder, by its sizes.

        Args:
            config: a Hugging Face config object, or its ``config.json`` as a mapping.
            fixed: bytes of weights, gradients and optimizer, where they are known.
            rank: of low-rank adapters on all linear layers, which alone are trained, in float32; None trains all.
            states: numbers that the optimizer keeps for each trained one: 2 for AdamW.
            itemsize: bytes of an activation, and of a weight and its states.
            adapted: the sum of the ranks of a layer's adapters, where it is known.
            adapts_mlp: whether MLPs have adapters; by ``rank`` if None.
            gradients: bytes of the gradients, where they are known.
            head: whether the output layer and the norms are trained; by ``rank`` if None.
            tiles: the parts of layers that long rows compute by tiles; by the family if None.

        Raises:
            PackingError: the config does not say how large the model is, or a size is not one integer.
            UnsupportedModelError: it has layers whose memory the formula does not know.
        """
        sizes = DecoderSizes.read(config, itemsize)
        head = rank is None and not adapted if head is None else head
        count = sizes.parameters if rank is None else rank * sizes.linear
        if gradients is None:
            gradients = (itemsize if rank is None else 4) * count
        if fixed is None:
            fixed = itemsize * sizes.parameters + (1 + states) * gradients - _saved_by_4_bits(config, sizes, itemsize)
        if adapted is None:
            adapted = 7 * rank if rank else 0
        adapts_mlp = bool(rank) if adapts_mlp is None else adapts_mlp
        kept = dict.fromkeys(LEVELS, 0)
        works: list[dict[str, int]] = []
        works_by_tiles: list[dict[str, int]] = []
        levels: set[str] = set()
        for kind in sizes.kinds:
            statistics = kind.mixer.statistics + kind.feed.routing
            narrow = kind.norms * sizes.width + kind.mixer.kept + adapted
            first_product = kind.feed.inner if kind.feed.routed or kind.feed.is_narrow(sizes.width) else 0
            kept["none"] += kind.layers * (itemsize * (narrow + kind.feed.inner) + statistics)
            kept["selective"] += kind.layers * (itemsize * (narrow - kind.mixer.twice + first_product) + statistics)
            kept["attention"] += kind.layers * (itemsize * (sizes.width + kind.mixer.attended) + kind.mixer.statistics)
            kept["full"] += kind.layers * itemsize * sizes.width
            by_tiles = kind.tiles if tiles is None else {*tiles} & kind.tiles
            for parts, found in ((set(), works), (by_tiles, works_by_tiles)):
                rule = {"trained": head, "adapts_mlp": adapts_mlp}
                found.append(_work(sizes.width, kind, narrow, statistics, itemsize, parts, **rule))
            levels.update(LEVELS_OF_TILES if "projections" in by_tiles else kind.feed.tiled if by_tiles else ())
        work, tiled = (
            {level: max(each[level] for each in kinds) for level in LEVELS} for kinds in (works, works_by_tiles)
        )
        embedded = sizes.vocabulary * sizes.width if head else 0
        return cls(
            fixed=fixed,
            gradients=gradients,
            kept=kept,
            work=work,
            hidden=itemsize * sizes.width,
            layers=sizes.layers,
            logits=itemsize * sizes.vocabulary,
            head=itemsize * embedded,
            head_sum=4 * embedded,
            tiled={level: tiled[level] for level in LEVELS if level in levels},
            tile=max(_tile(sizes.width, kind, itemsize, trained=not adapted) for kind in sizes.kinds),
            behind_experts=2 * itemsize * sizes.width if any(kind.feed.routed for kind in sizes.kinds) else 0,
        )


def _saved_by_4_bits(config: Any, sizes: DecoderSizes, itemsize: int) -> int:
    """Returns the bytes by which weights in 4 bits are less than others: of linear layers, or of experts in MXFP4.

    bitsandbytes loads linear layers, and leaves stacked experts as they are. A block of 64 values has a magnitude of 4
    bytes, or of a byte and 4 for each 256 blocks; in MXFP4 one of 32 values has a byte. While a layer computes, it
    holds the values of one weight.
    """
    stored = ConfigReader(ConfigReader(config).find("quantization_config") or {})
    if stored.find("quant_method") == "mxfp4":
        values = sum(kind.layers * kind.feed.stacked for kind in sizes.kinds)
        first = max(kind.feed.stacked * 2 // 3 if kind.feed.gated else kind.feed.stacked // 2 for kind in sizes.kinds)
        return values * itemsize - values * 17 // 32 - itemsize * first
    if not stored.find("load_in_4bit"):
        return 0
    feeds = [FeedForward() if kind.feed.routed else kind.feed for kind in sizes.kinds]
    values = sum(k.layers * (k.mixer.parameters + feed.parameters) for k, feed in zip(sizes.kinds, feeds, strict=True))
    block = 1 + 4 / 256 if stored.find("bnb_4bit_use_double_quant") else 4
    one = max(*(feed.parameters // (3 if feed.gated else 2) for feed in feeds), sizes.width**2)
    return int(values * (itemsize - 1 / 2 - block / 64)) - itemsize * one


def _tile(width: int, kind: LayerSizes, itemsize: int, *, trained: bool) -> int:
    """Returns what a layer holds for a tile of its MLP or experts, and their weights' gradients in float32."""
    feed = kind.feed
    if not feed.tiled:
        return 0
    columns = feed.inside + 2 * width if feed.routed else 5 * feed.inner // 2 + 2 * width
    return itemsize * TILE * columns + (4 * feed.parameters if trained else 0)


def _work(
    width: int,
    kind: LayerSizes,
    narrow: int,
    statistics: int,
    itemsize: int,
    tiles: Collection[Part],
    *,
    trained: bool,
    adapts_mlp: bool,
) -> dict[str, int]:
    """Returns what a layer holds for a token while it computes its gradients, but for what it holds of a tile.

    Three times count: in the MLP, in attention, and at the end, where products with each projection's weight wait to be
    added up. The order is that of compiled layers, which compute the gradients of weights and norms last.

    Args:
        tiles: the parts that are computed by tiles.
    """
    mixer, feed = kind.mixer, kind.feed
    again = narrow - width  # what "full" recomputes, but for the inner columns
    with_norm = "projections" in tiles
    norm_by_tiles = with_norm and "mlp" in tiles and not feed.routed
    # what the second norm's weight reads: its input, and the gradient of its output by each half of a gated MLP
    late = 0 if norm_by_tiles or not trained else width if "mlp" in tiles else 2 * width
    second = width if trained and not norm_by_tiles else 0
    # normalised input, gradients of what attention reads and returns
    around = mixer.gradients + (0 if with_norm else width) + late
    # normalised input, gradients of what attention reads, and of that input by each of three projections; of the
    # layer's input alone where these are tiles
    end = mixer.gradients - mixer.output + (width if with_norm else 4 * width) + late
    work: dict[str, int] = {}
    for level in ("none", "selective", "full"):
        if "mlp" in tiles and level in feed.tiled:
            mlp = (0 if norm_by_tiles else 2 * width) + (feed.inside_tiles if level == "full" else 0)
        else:
            kept = feed.inner if level == "none" or (level == "selective" and feed.routed) else 0
            mlp = width + feed.inside - kept + (feed.beside_adapters(kept > 0) if adapts_mlp else 0)
        if level == "full":
            columns = max(
                again + width + mlp,
                again - width + second + around,
                end + mixer.output + second,
            )
        else:
            columns = max(mlp, around, end)
        work[level] = itemsize * columns + (statistics if level == "full" else 0)
    # what was kept of attention is not held twice
    attended = itemsize * mixer.attended + mixer.statistics
    return work | {"attention": work["full"] - attended, "offload": work["full"]}
