"""The conformance adapter: torch_backend seen through ``packing_core.protocol``, on the GPU where there is one.

``torch:sdpa`` takes part at all four levels; the other names differ in nothing but the attention, so they take part
with the operation and the model that depend on it. Data flows numpy float32 -> the named dtype -> torch_backend ->
numpy float32; segment ids become boundaries as a collator makes them, padding in segments of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig

from packing_core import protocol
from packing_core.errors import UnsupportedError
from packing_core.protocol import (
    Array,
    Backend,
    BackendFactory,
    Batch,
    Capabilities,
    Document,
    Gradients,
    OperationCall,
    takes_call,
)
from packing_core.protocol.backend import PackingMethods
from torch_backend.collate import PackedCollator, with_boundaries
from torch_backend.conformance.clips import ClipMethods
from torch_backend.conformance.experts import ExpertMethods
from torch_backend.conformance.ranks import ContextMethods, on_ranks
from torch_backend.conformance.reductions import DocumentMethods
from torch_backend.conformance.scans import ScanMethods
from torch_backend.conformance.selection import SelectionMethods
from torch_backend.conformance.tensors import to_numpy
from torch_backend.interpretation import interpret_quickly
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.losses.cross_entropy import next_token_targets, normalise, packed_cross_entropy
from torch_backend.ops.attention import IMPLEMENTATIONS, AttentionRequest, attention, load, rejections, request_of
from torch_backend.ops.attention.probe import Probed
from torch_backend.ops.attention.selected import LongDocuments, SelectedKeys, selected_attention
from torch_backend.ops.document_batches import per_document
from torch_backend.ops.rope import apply_rope
from torch_backend.patching import patch

# What each option of attention asks of an implementation.
_ASKS: dict[str, dict[str, Any]] = {
    "bidirectional": {"causal": False},
    "window": {"window": 4},
    "softcap": {"softcap": 1.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "gqa": {"kv_heads": 2},
    "narrow_values": {"value_dim": 32},
    "both_ways": {"both_ways": True},
}
# Implementations whose padding is seen to reach no other product: 0 times NaN is NaN.
_LEAVES_PADDING_OUT = {"sdpa", "reference", "triton"}
# Implementations that are known to add gradients up in no certain order on a GPU.
_ATOMIC = {"flash4", "flash3", "flash2", "varlen", "xformers", "sdpa"}


def backends() -> Mapping[str, BackendFactory]:
    """Returns the backends of the entry point ``torch``, one per attention implementation."""
    return {name: partial(_make, name) for name in IMPLEMENTATIONS}


def _make(name: str) -> Backend:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    declared = capabilities(name, device)
    plain = _request(device, declared.dtypes[0] if declared.dtypes else "float32")
    reason = rejections(plain, name)[name]
    if reason is not None:
        hint = "; TRITON_INTERPRET=1 runs its kernels on the CPU" if declared.interpreted else ""
        raise UnsupportedError(reason + hint)
    if declared.interpreted:
        interpret_quickly()
    return (TorchStack if name == "sdpa" else TorchAttentionStack)(name, device, declared)


def capabilities(name: str, device: torch.device) -> Capabilities:
    """Returns the declared capabilities of one implementation, without running it; the tests check that they hold."""
    served = load(name)
    refuses = served.refuses if isinstance(served, Probed) else served.supports

    def takes(**change: Any) -> bool:
        return refuses(replace(request, **change)) is None

    interpreted = name == "triton" and device.type == "cpu"
    dtypes = tuple(dtype for dtype in protocol.DTYPES if refuses(_request(device, dtype)) is None)
    if interpreted:  # Triton's interpreter multiplies bfloat16 matrices wrongly, and the probe refuses it
        dtypes = tuple(dtype for dtype in dtypes if dtype != "bfloat16")
    request = _request(device, dtypes[0] if dtypes else "float32")
    options = {option for option, change in _ASKS.items() if takes(**change)}
    if "bidirectional" in options and "window" in options and not takes(causal=False, window=4):
        options.remove("bidirectional")  # what is declared works together
    options |= protocol.ALL_OPTIONS - set(protocol.OPTIONS["attention"]) | {"arbitrary_ids"}
    if name in _LEAVES_PADDING_OUT:
        options.add("nonfinite_padding")
    if not getattr(served, "parents", False):
        options -= {"shared_prefixes"}
    if not getattr(served, "both_ways", False):
        options -= {"both_ways"}
    if name in ("sdpa", "triton"):  # those that run selected keys themselves: plain torch and the kernels
        options |= {"selected_keys", "selected_blocks"}
    if device.type == "cuda":  # gloo has no all-to-all of its tensors
        options -= {"cut_documents"}
    if "window" not in options:
        options -= {"sliding_window"}
    return Capabilities(
        dtypes=dtypes,
        options=frozenset(options),
        head_dims={width for width in range(1, 513) if takes(head_dim=width, value_dim=width)},
        interpreted=interpreted,
        atomic_backward=name in _ATOMIC and device.type == "cuda",
    )


def _request(device: torch.device, dtype: str) -> AttentionRequest:
    return AttentionRequest(
        tokens=64,
        heads=4,
        kv_heads=4,
        head_dim=64,
        value_dim=64,
        dtype=getattr(torch, dtype),
        device=device,
        segments=4,
        max_seqlen=32,
        scale=0.125,
    )


class TorchAttentionStack(SelectionMethods):
    """The levels that depend on the attention implementation: attention itself and a model's forward and backward."""

    def __init__(self, name: str, device: torch.device, declared: Capabilities) -> None:
        self.name = name
        self.device = device
        self.capabilities = declared
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self.description = f"torch {torch.__version__} on {kind}" + (", interpreted" if declared.interpreted else "")

    @takes_call("q", "k", "v", "sinks")
    def attention(self, call: OperationCall) -> tuple[Array, Gradients]:
        # Some serve an option in one case alone, which is not what declaring it means.
        protocol.require_declared(self, options=protocol.attention_options(**call.options | call.operands))
        options = {name: value for name, value in call.options.items() if name != "context_ranks"}
        names = ("alibi_slopes", "spans", "index_q", "index_k", "index_weights")
        arrays = {name: x for name in names if (x := options.pop(name, None)) is not None}
        slopes, spans, *of_index = (
            torch.tensor(arrays[name], device=self.device) if name in arrays else None for name in names
        )
        packed = self._packed(call.segment_ids)
        if spans is not None:
            packed = packed.with_spans(spans.flatten())

        top_k = options.pop("top_k", None)
        block = options.pop("index_block", 1)
        budget = None if top_k is None else top_k if block == 1 else (top_k + 1) * block - 1
        long = None if budget is None else LongDocuments.of(packed, budget, block=block)
        index = [x.flatten(0, 1) for x in of_index if x is not None]

        def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
            if long is not None:
                request = request_of(q, k, v, packed, sinks=sinks, **options)
                keys = SelectedKeys(self.selected(index, long, top_k), long, request, sinks, implementation=self.name)
                return selected_attention(q, k, v, keys).unflatten(0, call.segment_ids.shape)
            chosen = {"sinks": sinks, "alibi_slopes": slopes, "implementation": self.name, **options}
            return attention(q, k, v, packed, **chosen).unflatten(0, call.segment_ids.shape)

        return self._run(attend, call)

    def forward(self, decoder: protocol.Decoder, batch: Batch, *, dtype: str) -> Array:
        with torch.no_grad():
            return to_numpy(self._model(decoder, dtype)(**self._inputs(batch)).logits)

    def gradients(self, decoder: protocol.Decoder, batch: Batch, *, dtype: str) -> tuple[float, Gradients]:
        model = self._model(decoder, dtype)
        inputs = self._inputs(batch)
        targets = next_token_targets(inputs.pop("labels"))
        loss, weight = packed_cross_entropy(model(**inputs).logits, targets)
        mean = loss / weight if weight > 0 else loss  # a sum over nothing is 0, and so are its gradients
        mean.backward()
        return mean.item(), {name: to_numpy(x.grad) for name, x in model.named_parameters()}

    def shared_gradients(
        self, decoder: protocol.Decoder, documents: Sequence[Document], *, dtype: str
    ) -> tuple[float, Gradients, int]:
        protocol.require_declared(self, options={"shared_prefixes"})
        model = self._model(decoder, dtype)
        batch = self._on_device(PackedCollator(model, share_prefix=True)([_feature(d) for d in documents]))
        loss, weight = causal_lm_loss(model, batch)
        mean = loss / weight
        mean.backward()
        gradients = {name: to_numpy(x.grad) for name, x in model.named_parameters()}
        return mean.item(), gradients, batch["input_ids"].numel()

    # -- from the protocol's words to torch's --------------------------------------------------------------------

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        """The batch as its collator made it, or a drawn one with the boundaries that any collator can be given."""
        native = batch.native
        if native is None:
            arrays = {name: getattr(batch, name) for name in ("input_ids", "labels", "segment_ids")}
            native = with_boundaries(lambda arrays: {name: torch.tensor(x) for name, x in arrays.items()})(arrays)
        return self._on_device(native)

    def _on_device(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in batch.items()}

    def _model(self, decoder: protocol.Decoder, dtype: str) -> nn.Module:
        """A patched transformers model of the suite's decoder, its gradients cleared."""
        config = decoder.config
        taken = {"sliding_window": config.sliding_window, "dynamic_rope": config.dynamic_rope_factor}
        options = [name for name, value in taken.items() if value is not None]
        protocol.require_declared(self, dtype=dtype, options=options, head_dim=config.head_dim)
        model = _patched(config, self.name, dtype, self.device)
        weights = {name: torch.tensor(x) for name, x in decoder.weights.items()}
        missing = model.load_state_dict(weights, strict=False).missing_keys
        assert set(missing) <= {"lm_head.weight"}, missing  # tied to the embedding
        model.zero_grad()
        return model


@lru_cache(maxsize=8)
def _patched(config: protocol.DecoderConfig, name: str, dtype: str, device: torch.device) -> nn.Module:
    shape = {
        field: getattr(config, field)
        for field in protocol.DecoderConfig.__dataclass_fields__
        if field not in {"rope_theta", "sliding_window", "dynamic_rope_factor"}
    }
    rope = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if config.dynamic_rope_factor is not None:
        rope |= {"rope_type": "dynamic", "factor": config.dynamic_rope_factor}
    # Llama with a window is Mistral, down to the names of its weights.
    family: PretrainedConfig
    if config.sliding_window is None:
        family = LlamaConfig(**shape, rope_parameters=rope)
    else:
        family = MistralConfig(**shape, rope_parameters=rope, sliding_window=config.sliding_window)
    # Made in its dtype, as from_pretrained does. Cast later, the frequencies of RoPE would be cast with the weights; a
    # rounding of 2^-11 in a frequency is an angle of 0.17 at position 352.
    model = AutoModelForCausalLM.from_config(family, dtype=getattr(torch, dtype)).train().to(device)
    return patch(model, implementation=name, verify=False)


class TorchStack(
    TorchAttentionStack, DocumentMethods, ScanMethods, ClipMethods, ExpertMethods, ContextMethods, PackingMethods
):
    """Everything: the attention's levels, and the operations, collator and trainer that do not depend on it."""

    def collate(self, documents: Sequence[Document], capacity: int) -> Batch:
        # A column of the user's own is zero at padding, which tells it from a segment.
        features = [_feature(d) | {"real": np.ones(len(d.input_ids), np.int64)} for d in documents]
        native = PackedCollator(capacity=capacity)(features)
        real = _integers(native.pop("real"))
        positions = _integers(native["position_ids"])
        segment_ids = ((positions == 0) & (real == 1)).cumsum(axis=1) * real
        return Batch(_integers(native["input_ids"]), segment_ids, positions, _integers(native["labels"]), native)

    @takes_call("x")
    def rope(self, call: OperationCall) -> tuple[Array, Gradients]:
        options = dict(call.options)
        angles = options.pop("position_ids")[..., None] * options.pop("inv_freq").astype(np.float64)
        cos, sin = (torch.tensor(x, device=self.device).float() for x in (np.cos(angles), np.sin(angles)))

        def turn(x: Tensor) -> Tensor:
            key = x[:, :, :1].detach()  # a model turns queries and keys together; the queries are looked at
            return apply_rope(x, key, cos, sin, **options)[0]

        return self._run(turn, call)

    @takes_call("x", "dt", "A", "B", "C")
    def scan(self, call: OperationCall) -> tuple[Array, Gradients]:
        def run(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
            layer = partial(_scan, A)
            out: Tensor = per_document(self._packed(call.segment_ids), layer, (x, dt, B, C), {})
            return out

        return self._run(run, call)

    def loss(
        self,
        logits: Array,
        labels: Array,
        segment_ids: Array,
        *,
        dtype: str,
        token_weights: Array | None = None,
    ) -> tuple[float, float, Array]:
        tokens = np.where(segment_ids > 0, labels, 0)  # labels are tokens, and those of padding are all the same
        given = {"input_ids": tokens, "segment_ids": segment_ids, "labels": labels}
        marked = with_boundaries(lambda batch: {name: torch.tensor(x) for name, x in batch.items()})(given)["labels"]
        targets = next_token_targets(marked).to(self.device)
        # The weight of a label travels with it to the token before, which predicts it.
        weights = (
            None if token_weights is None else torch.tensor(np.roll(token_weights, -1, axis=1), device=self.device)
        )
        operands = self._operands({"logits": logits}, dtype)
        loss, weight = packed_cross_entropy(operands["logits"], targets, weights=weights)
        (gradient,) = torch.autograd.grad(loss, operands["logits"])
        return loss.item(), weight.item(), to_numpy(gradient)

    def train(
        self,
        decoder: protocol.Decoder,
        steps: Sequence[Sequence[Sequence[Document]]],
        *,
        ranks: int = 1,
        **options: Any,
    ) -> tuple[list[float], dict[str, Array]]:
        if ranks == 1:
            return self._train(decoder, steps, **options)
        shares = [[step[rank::ranks] for step in steps] for rank in range(ranks)]
        each = [(decoder, share) for share in shares]
        found: list[tuple[list[float], dict[str, Array]]] = on_ranks(self.device, partial(self._train, **options), each)
        return found[0]

    def _train(
        self,
        decoder: protocol.Decoder,
        steps: Sequence[Sequence[Sequence[Document]]],
        *,
        capacity: int,
        learning_rate: float,
        dtype: str,
        optimizer: str = "sgd",
    ) -> tuple[list[float], dict[str, Array]]:
        model = self._model(decoder, "float32")
        narrow = None if dtype == "float32" else getattr(torch, dtype)
        collate = PackedCollator(model, capacity=capacity)
        updates: torch.optim.Optimizer
        if optimizer == "sgd":
            updates = torch.optim.SGD(model.parameters(), lr=learning_rate)
        else:
            updates = torch.optim.AdamW(
                model.parameters(), lr=learning_rate, eps=protocol.ADAMW_EPSILON, weight_decay=0.0
            )
        losses = []
        for microbatches in steps:
            sums = torch.zeros(2, device=self.device)
            for documents in microbatches:
                batch = collate([_feature(d) for d in documents])
                inputs = self._on_device(batch)
                targets = next_token_targets(inputs.pop("labels"))
                with torch.autocast(self.device.type, narrow, enabled=narrow is not None):
                    logits = model(**inputs).logits
                sums = sums + torch.stack(packed_cross_entropy(logits, targets))
            if _over_ranks(sums[1]) == 0:
                losses.append(0.0)  # a step without targets has no mean, and moves nothing
                continue
            loss = normalise(*sums)
            updates.zero_grad()
            if loss.requires_grad:  # else this rank has no microbatch, and its gradients are the zeros that it sends
                loss.backward()
            losses.append(_mean_over_ranks(loss, model))
            updates.step()
        return losses, {name: to_numpy(x) for name, x in model.named_parameters()}


def _feature(document: Document) -> dict[str, Array]:
    return {"input_ids": document.input_ids, "labels": document.labels}


def _scan(A: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """The recurrence as a model's plain path writes it, over whole rows [n, L, M] and without a word of segments."""
    decay = torch.exp(dt[..., None] * A)
    inflow = (dt * x)[..., None] * B[:, :, None]
    state, outputs = torch.zeros_like(inflow[:, 0]), []
    for t in range(x.shape[1]):
        state = decay[:, t] * state + inflow[:, t]
        outputs.append((state * C[:, t, None]).sum(-1))
    return torch.stack(outputs, 1)


def _over_ranks(x: Tensor) -> float:
    """The sum of a number over the ranks."""
    total = x.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item()


def _mean_over_ranks(loss: Tensor, model: nn.Module) -> float:
    """Average the gradients over the ranks, as DistributedDataParallel does, and return the average loss."""
    mean = loss.detach().clone()
    if dist.is_initialized():
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        for x in (mean, *(p.grad for p in model.parameters() if p.grad is not None)):
            dist.all_reduce(x)
            x /= dist.get_world_size()
    return mean.item()


def _integers(x: Tensor) -> Array:
    return x.numpy().astype(np.int64)
