"""The suite's decoder in numpy, forward and backward by hand: the oracle of the model and trainer levels.

What acts on each token alone (embedding, RMSNorm, projections, SwiGLU) stands here; what mixes tokens comes in as a
`Mixing`, so that the same decoder runs one document alone (the oracle, `one_document`) and packed rows (the reference
backend). Axis names: T tokens, C hidden, H heads, D head width, V words. Data flows from token ids to logits, and
`Backward` from their gradient to the weights'.

Sources: Llama (Touvron et al. 2023, https://arxiv.org/abs/2302.13971, section 2.2) for the layer; RMSNorm
(https://arxiv.org/abs/1910.07467, eq. 4); SwiGLU (https://arxiv.org/abs/2002.05202, eq. 6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np

from packing_core import reference
from packing_core.protocol import ADAMW_EPSILON, Array, Decoder, DecoderConfig, Document, Gradients
from packing_core.reference.arithmetic import WorkingDtype, operands, plain

Backward = Callable[[Array], Gradients]
Sums = tuple[float, float, Gradients]  # loss sum, number of trained labels, gradients of the loss sum
EMBEDDING = "model.embed_tokens.weight"
State = dict[str, tuple[Array, Array]]  # AdamW's moments by weight name


class Mixing(Protocol):
    """The operations in which tokens meet; each returns its result and its vector-Jacobian product."""

    def rope(self, x: Array) -> tuple[Array, Callable[[Array], Array]]:
        """``[T, H, D]`` turned by each token's position."""
        ...

    def attention(self, q: Array, k: Array, v: Array) -> tuple[Array, Callable[[Array], tuple[Array, Array, Array]]]:
        """``[T, H, D]`` from q ``[T, H, D]`` and k, v ``[T, K, D]``."""
        ...


def run(
    decoder: Decoder, input_ids: Array, mixing: Mixing, *, dtype: WorkingDtype = "float64"
) -> tuple[Array, Backward]:
    """Logits ``[T, V]`` of tokens ``[T]``, and the function from their gradient to that of every weight."""
    h, hidden_back = hidden(decoder, input_ids, mixing, dtype=dtype)
    (embedding,) = operands(dtype, decoder.weights[EMBEDDING])

    def backward(dlogits: Array) -> Gradients:
        (dlogits,) = operands(dtype, dlogits)
        gradients = hidden_back(dlogits @ embedding)
        gradients[EMBEDDING] = dlogits.T @ h + gradients[EMBEDDING]  # tied: head and embedding
        return {name: plain(gradient) for name, gradient in gradients.items()}

    return plain(h @ embedding.T), backward


def hidden(
    decoder: Decoder, input_ids: Array, mixing: Mixing, *, dtype: WorkingDtype = "float64"
) -> tuple[Array, Backward]:
    """Last hidden states ``[T, C]`` of tokens ``[T]``, and the function from their gradient; both in ``dtype``."""
    config = decoder.config
    w = {name: operands(dtype, array)[0] for name, array in decoder.weights.items()}
    layers = []
    x = w[EMBEDDING][input_ids]
    for i in range(config.num_hidden_layers):
        prefix = f"model.layers.{i}."
        layer = {name.removeprefix(prefix): array for name, array in w.items() if name.startswith(prefix)}
        x, attend_back = _attention_block(x, layer, config, mixing, dtype)
        x, feed_back = _feed_forward_block(x, layer, config)
        layers.append((prefix, attend_back, feed_back))
    h, norm_back = _rms_norm(x, w["model.norm.weight"], config.rms_norm_eps)

    def backward(dh: Array) -> Gradients:
        gradients: Gradients = {}
        dx, gradients["model.norm.weight"] = norm_back(dh)
        for prefix, attend_back, feed_back in reversed(layers):
            for block_back in (feed_back, attend_back):
                dx, found = block_back(dx)
                gradients |= {prefix + name: gradient for name, gradient in found.items()}
        (one_hot,) = operands(dtype, input_ids[:, None] == np.arange(config.vocab_size))
        gradients[EMBEDDING] = one_hot.T @ dx
        return gradients

    return h, backward


def embedding_alone(
    decoder: Decoder, input_ids: Array, how: str, *, dtype: WorkingDtype = "float64"
) -> tuple[Array, Backward]:
    """The vector ``[C]`` of one document alone, and the function from its gradient to that of every weight."""
    h, hidden_back = hidden(decoder, input_ids, _Alone(decoder.config, len(input_ids), dtype), dtype=dtype)
    pooled = {"first": h[0], "last": h[-1], "mean": h.mean(axis=0)}[how]
    places = np.arange(len(h))
    (share,) = operands(
        dtype, {"first": places == 0, "last": places == len(h) - 1, "mean": 0 * places + 1 / len(h)}[how]
    )

    def backward(dout: Array) -> Gradients:
        (dout,) = operands(dtype, dout)
        return {name: plain(gradient) for name, gradient in hidden_back(share[:, None] * dout).items()}

    return plain(pooled), backward


def alone(
    decoder: Decoder, input_ids: Array, *, dtype: WorkingDtype = "float64", mixing: WorkingDtype | None = None
) -> tuple[Array, Backward]:
    """Logits ``[n, V]`` of one document alone, and the function from their gradient to that of every weight.

    ``mixing`` is the dtype inside of rope and attention, if it is another one.
    """
    return run(decoder, input_ids, _Alone(decoder.config, len(input_ids), mixing or dtype), dtype=dtype)


def one_document(
    decoder: Decoder, document: Document, *, dtype: WorkingDtype = "float64", mixing: WorkingDtype | None = None
) -> tuple[float, float, Gradients]:
    """One document alone: loss sum, number of trained labels, gradients of the loss sum; see :func:`alone`."""
    logits, backward = alone(decoder, document.input_ids, dtype=dtype, mixing=mixing)
    targets = np.append(document.labels[1:], -100)
    loss, weight = reference.cross_entropy(logits, targets, dtype=dtype)
    dlogits = reference.cross_entropy_vjp(logits, targets, dtype=dtype)["logits"]
    return loss, weight, backward(dlogits)


def summed(parts: Iterable[Sums]) -> Sums:
    """The sums of several documents' losses, weights and gradients."""
    loss, weight, total = 0.0, 0.0, Gradients()
    for part_loss, part_weight, gradients in parts:
        loss, weight = loss + part_loss, weight + part_weight
        total = {name: total.get(name, 0.0) + gradient for name, gradient in gradients.items()}
    return loss, weight, total


def mean(sums: Sums) -> tuple[float, Gradients]:
    """The mean loss over all trained labels and its gradients; 0 where nothing is trained."""
    loss, weight, total = sums
    share = 1 / weight if weight else 0.0
    return loss * share, {name: gradient * share for name, gradient in total.items()}


def inv_freq(config: DecoderConfig, length: int) -> Array:
    """Rotary frequencies ``[D/2]``, float32, for a document of ``length`` tokens.

    Dynamic NTK (as in Hugging Face's "dynamic" rope type) raises the base once a document is longer than the model's
    original context: ``theta * (f * n / n0 - (f - 1)) ** (D / (D - 2))``.
    """
    width, theta = config.head_dim, config.rope_theta
    if config.dynamic_rope_factor is not None:
        factor, original = config.dynamic_rope_factor, config.max_position_embeddings
        stretch = factor * max(length, original) / original - (factor - 1)
        theta = theta * stretch ** (width / (width - 2))
    return (theta ** (-np.arange(0, width, 2) / width)).astype(np.float32)


def updated(
    decoder: Decoder,
    gradients: Gradients,
    state: State,
    *,
    step: int,
    learning_rate: float,
    optimizer: str,
    dtype: WorkingDtype = "float64",
) -> Decoder:
    """The decoder after one step of SGD, or of AdamW (https://arxiv.org/abs/1711.05101, algorithm 2) without decay.

    Args:
        state: AdamW's moments, changed in place; start with an empty one.
        step: 1 for the first one.
    """
    weights = {}
    for name, weight in decoder.weights.items():
        w, g = operands(dtype, weight, gradients[name])
        if optimizer == "adamw":
            mean, square = state.get(name, (0.0 * w, 0.0 * w))
            mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * (g * g)
            state[name] = mean, square
            g = (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.999**step)) + ADAMW_EPSILON)
        weights[name] = plain(w - learning_rate * g)
    return replace(decoder, weights=weights)


class _Alone:
    """The mixing operations of one document of ``length`` tokens, from `packing_core.reference`."""

    def __init__(self, config: DecoderConfig, length: int, dtype: WorkingDtype) -> None:
        self._bounds = [0, length]
        self._positions = np.arange(length)
        self._inv_freq = inv_freq(config, length)
        self._window = config.sliding_window
        self._dtype = dtype

    def rope(self, x: Array) -> tuple[Array, Callable[[Array], Array]]:
        where = (self._positions, self._inv_freq)

        def back(dout: Array) -> Array:
            return reference.rope_vjp(x, *where, dout, dtype=self._dtype)["x"]

        return reference.rope(x, *where, dtype=self._dtype), back

    def attention(self, q: Array, k: Array, v: Array) -> tuple[Array, Callable[[Array], tuple[Array, Array, Array]]]:
        where, window, dtype = self._bounds, self._window, self._dtype

        def back(dout: Array) -> tuple[Array, Array, Array]:
            found = reference.attention_vjp(q, k, v, where, dout, window=window, dtype=dtype)
            return found["q"], found["k"], found["v"]

        return reference.attention(q, k, v, where, window=window, dtype=dtype), back


_BlockBackward = Callable[[Array], tuple[Array, Gradients]]


def _attention_block(
    x: Array, w: Mapping[str, Array], config: DecoderConfig, mixing: Mixing, dtype: WorkingDtype
) -> tuple[Array, _BlockBackward]:
    tokens = len(x)
    h, norm_back = _rms_norm(x, w["input_layernorm.weight"], config.rms_norm_eps)
    q, k, v = (
        (h @ w[f"self_attn.{name}_proj.weight"].T).reshape(tokens, -1, config.head_dim) for name in ("q", "k", "v")
    )
    (q, q_back), (k, k_back) = mixing.rope(q), mixing.rope(k)
    mixed, mix_back = mixing.attention(q, k, v)
    (mixed,) = operands(dtype, mixed.reshape(tokens, -1))
    out = x + mixed @ w["self_attn.o_proj.weight"].T

    def backward(dout: Array) -> tuple[Array, Gradients]:
        gradients = {"self_attn.o_proj.weight": dout.T @ mixed}
        dq, dk, dv = mix_back((dout @ w["self_attn.o_proj.weight"]).reshape(tokens, -1, config.head_dim))
        dh = 0.0 * h
        for name, found in (("q", q_back(dq)), ("k", k_back(dk)), ("v", dv)):
            (gradient,) = operands(dtype, found.reshape(tokens, -1))
            gradients[f"self_attn.{name}_proj.weight"] = gradient.T @ h
            dh = dh + gradient @ w[f"self_attn.{name}_proj.weight"]
        dx, gradients["input_layernorm.weight"] = norm_back(dh)
        return dout + dx, gradients

    return out, backward


def _feed_forward_block(x: Array, w: Mapping[str, Array], config: DecoderConfig) -> tuple[Array, _BlockBackward]:
    h, norm_back = _rms_norm(x, w["post_attention_layernorm.weight"], config.rms_norm_eps)
    gate, up = h @ w["mlp.gate_proj.weight"].T, h @ w["mlp.up_proj.weight"].T
    sigmoid = 1.0 / (1.0 + np.exp(-gate))
    inner = gate * sigmoid * up
    out = x + inner @ w["mlp.down_proj.weight"].T

    def backward(dout: Array) -> tuple[Array, Gradients]:
        dinner = dout @ w["mlp.down_proj.weight"]
        dgate = dinner * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))
        dup = dinner * gate * sigmoid
        dx, dnorm = norm_back(dgate @ w["mlp.gate_proj.weight"] + dup @ w["mlp.up_proj.weight"])
        return dout + dx, {
            "mlp.down_proj.weight": dout.T @ inner,
            "mlp.gate_proj.weight": dgate.T @ h,
            "mlp.up_proj.weight": dup.T @ h,
            "post_attention_layernorm.weight": dnorm,
        }

    return out, backward


def _rms_norm(x: Array, weight: Array, epsilon: float) -> tuple[Array, Callable[[Array], tuple[Array, Array]]]:
    inverse = 1.0 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon)
    normed = x * inverse

    def backward(dout: Array) -> tuple[Array, Array]:
        dnormed = dout * weight
        along = (dnormed * normed).mean(axis=-1, keepdims=True)
        return inverse * (dnormed - normed * along), (dout * normed).sum(axis=0)

    return normed * weight, backward
