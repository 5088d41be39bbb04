"""Names the implementation that runs, and why others were rejected, for a call or for each kind of a decoder's layers
and its output head, and says whether its layers are scanned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jax_backend.attention import ORDER, answers, request_for
from jax_backend.attention.sharding import platform_of
from jax_backend.losses import output_layer
from jax_backend.model.decoder import SCANNED_FROM, Decoder
from jax_backend.scan.chunked_scan import CHUNK
from packing_core.diagnosis import LayerChoice, first_served
from packing_core.errors import PackingError


class Explanation(tuple[LayerChoice, ...]):
    """The choices, one for each kind of layer; printed, one line each."""

    def __str__(self) -> str:
        return "\n".join(f"{choice.layer}: {choice.implementation} ({choice.reason})" for choice in self)


def explain(
    what: Decoder | jax.Array | jax.ShapeDtypeStruct,
    k: Any = None,
    v: Any = None,
    *,
    rows: int = 1,
    tokens: int = 4096,
    platform: str | None = None,
    implementation: str | None = None,
    **options: Any,
) -> Explanation:
    """Names the implementation that runs, and why each one before it in the order was rejected.

    >>> print(explain(decoder, tokens=8192, platform="gpu"))  # doctest: +SKIP
    >>> print(explain(q, k, v, window=512, return_lse=True))  # doctest: +SKIP

    Args:
        what: a decoder, or the queries [B, S, N, D] of a call, concrete or a ``ShapeDtypeStruct``.
        k, v: keys [B, T, K, D] and values [B, T, K, E] of that call.
        rows, tokens: of a decoder's batch.
        platform: "cpu", "gpu" or "tpu"; None for the default one.
        implementation: the one that is asked for by name; None for the platform's order. A decoder has its own.
        options: of the call, as `segment_attention` takes them: ``causal``, ``window``, ``softcap``, ``scale``,
            ``return_lse``, ``max_segments``, and, of which only the presence counts, ``sinks`` and ``kv_segment_ids``.

    Raises:
        PackingError: an implementation or platform that there is not, or no keys and values.
    """
    platform = platform or platform_of(None, None)
    if platform not in ORDER:
        raise PackingError(f"platform is {platform!r}: pass one of {', '.join(ORDER)}")
    if isinstance(what, Decoder):
        return Explanation(_of_decoder(what, rows, tokens, platform))
    if k is None or v is None:
        raise PackingError("explain takes a Decoder, or the q, k and v of a call")
    request = request_for(what, k, v, platform=platform, **options)
    return Explanation([first_served("attention", answers(request, implementation))])


def _of_decoder(model: Decoder, rows: int, tokens: int, platform: str) -> Iterator[LayerChoice]:
    config = model.config
    like = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
    dtype = jax.eval_shape(lambda model, ids: model.model.embed_tokens(ids), model, like).dtype
    q, k = (
        jax.ShapeDtypeStruct((rows, tokens, heads, config.head_dim), dtype)
        for heads in (config.num_attention_heads, config.num_key_value_heads)
    )
    recurrent = [str(i) for i, kind in enumerate(config.layers) if kind.recurrent]
    if recurrent:
        reason = f"plain XLA in chunks of {CHUNK} tokens, on every platform"
        yield LayerChoice(f"layers {', '.join(recurrent)}, gated delta net", "chunked", reason)
    attention = {i: kind.window for i, kind in enumerate(config.layers) if not kind.recurrent}
    for window in dict.fromkeys(attention.values()):
        layers = [str(i) for i, each in attention.items() if each == window]
        request = request_for(
            q, k, k, platform=platform, window=window, softcap=config.attention_softcap, max_segments=model.max_segments
        )
        name = f"layers {', '.join(layers)}, " + (f"window {window}" if window else "full attention")
        yield first_served(name, answers(request, model.implementation))
    hidden = jax.ShapeDtypeStruct((rows * tokens, config.hidden_size), dtype)
    ways = output_layer.answers(hidden, config.vocab_size, platform=platform, softcap=config.final_softcap)
    yield first_served("output head and loss", ways)
    rule = f"scan_layers=None scans on a CPU from {SCANNED_FROM} layers on"
    yield LayerChoice(f"{len(config.layers)} layers", "scanned" if model.scan_layers else "one by one", rule)
