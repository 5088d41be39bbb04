"""``patch(model)``: a transformers causal language model trains packed without contamination, in place and undoably.

A packed batch -> a hook on the model takes the metadata out of the arguments -> a hook on its decoder puts it where the
attention mask goes (:mod:`.carry`) -> every layer receives it as an argument of the possibly checkpointed
call -> the registered attention function (:mod:`.attention`) serves it -> a last hook checks that every layer was
served. A batch without metadata takes the path it took before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from packing_core.errors import LayoutError, UnsupportedModelError
from torch_backend.hf import frequencies, rotary, router
from torch_backend.hf.attention import PreTrainedModel, causal_mask, register, unregistered
from torch_backend.hf.carry import CarriedMask, is_packed, take_metadata
from torch_backend.hf.families import SEE_PADDING, route_of
from torch_backend.hf.heads import head_of
from torch_backend.hf.mixers import Row, find_mixers, unwrap, wrap
from torch_backend.hf.placement import execution_device
from torch_backend.ops.attention import AttentionRequest, candidates, needs_host_lengths, prepare, select
from torch_backend.ops.documents import no_mask
from torch_backend.segments import PackedMetadata

Model = TypeVar("Model", bound=nn.Module)
_STATE = "_crosspack"
DATA_PARALLEL = "DataParallel splits a batch in the middle of its documents: use DistributedDataParallel (torchrun)"
WAY_OUT = (
    "let PackedCollator build the batches, or wrap the present collator, torch_backend.with_boundaries(collator), "
    "which marks the boundaries that it hints at"
)


def install(model: Model, implementation: str | Sequence[str] = "auto") -> Model:
    """Apply the edits to a model, in place; a model that has them already gets those of another ``implementation``.

    Raises:
        UnsupportedModelError: the model, or an option of it, cannot be made exact; the model is left as it was.
    """
    root = causal_lm(model)
    state = state_of(root)
    if state is not None and state.implementation == implementation:
        return model
    fresh = Patched(root, implementation)
    if state is not None:
        state.remove()
    fresh.install()
    return model


def unpatch(model: Model) -> Model:
    """Take everything back that :func:`install` did; without effect on a model that is not patched."""
    root = causal_lm(model)
    state = state_of(root)
    if state is not None:
        state.remove()
    return model


def causal_lm(model: nn.Module) -> Any:
    """The outermost transformers model inside ``model``.

    Raises:
        UnsupportedModelError: there is none, or DataParallel stands around it.
    """
    for module in model.modules():
        if isinstance(module, nn.DataParallel):
            raise UnsupportedModelError(DATA_PARALLEL)
        if isinstance(module, PreTrainedModel):
            return module
    raise UnsupportedModelError(f"there is no transformers model in {type(model).__name__}")


def state_of(root: nn.Module) -> Patched | None:
    """What :func:`patch` left on a model, None if it is not patched."""
    return root.__dict__.get(_STATE)


class Patched:
    """One patched model: what was found in it, what was changed, and the hooks.

    Attributes:
        root: the causal language model, decoder: the model inside it that makes the attention masks.
        implementation: what the user asked for.
        route, why: of its family, see :mod:`torch_backend.hf.families`.
        attention: the layers served by packed attention, mixers: what runs per document, each by name.
        rotaries: rotary modules whose frequencies depend on the batch.
        served: what each layer asked in the last packed forward, by id.
        compiled: what they asked before they were compiled, each kind once; see ``captured.compile_layers``.
    """

    def __init__(self, root: Any, implementation: str | Sequence[str]) -> None:
        self.root = root
        self.decoder = _decoder(root)
        self.implementation = implementation if isinstance(implementation, str) else tuple(implementation)
        own = dict(_own_modules(self.decoder))
        self.attention = {name: m for name, m in own.items() if _is_attention(m)}
        self.mixers = {name: m for name, m in find_mixers(self.decoder).items() if name in own}
        self.rotaries = frequencies.find(self.decoder)
        self.route, self.why = route_of(root.config, uses_interface=bool(self.attention or self.mixers))
        self.pad = root.config.model_type not in SEE_PADDING
        head_of(root)  # a head that reads rows raises here
        if self.route == "documents":
            self.attention, self.mixers = {}, {"the decoder": self.decoder}
            self.pad = self.pad and not self.rotaries
            self.rotaries = {}
        candidates(execution_device(root), self.implementation)  # an unknown name raises here
        self.handles: list[Any] = []
        self.before: list[tuple[Any, str]] = []
        self.received: PackedMetadata | None = None  # between the model's hook and its decoder's
        self.running: PackedMetadata | None = None  # while the decoder runs
        self.reached: set[str] = set()
        self.served: dict[int, Any] = {}
        self.compiled: set[AttentionRequest] = set()

    @property
    def layers(self) -> dict[str, nn.Module]:
        """Everything that must be handed the segments, by name."""
        return {**self.attention, **self.mixers}

    def install(self) -> None:
        served = (self.decoder, *self.attention.values()) if self.route == "attention" else ()
        for config in {id(m.config): m.config for m in served}.values():
            self.before.append((config, config._attn_implementation))
            config._attn_implementation_internal = register(unregistered(config._attn_implementation))
        for name, mixer in self.mixers.items():
            wrap(mixer, mask=partial(causal_mask, mixer) if name in self.attention else no_mask, pad=self.pad)
        for module in self.rotaries.values():
            frequencies.wrap(module, self._running)
        for name, layer in self.attention.items():
            if name not in self.mixers:
                rotary.wrap(layer)
        self.handles = [
            self.root.register_forward_pre_hook(self._receive, with_kwargs=True),
            self.root.register_forward_hook(self._check_taken),
            self.decoder.register_forward_pre_hook(self._hand_over, with_kwargs=True),
            self.decoder.register_forward_hook(self._check_served),
            *(layer.register_forward_pre_hook(partial(self._reach, name)) for name, layer in self.layers.items()),
        ]
        self.root.__dict__[_STATE] = self

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        for mixer in self.mixers.values():
            unwrap(mixer)
        for layer in self.attention.values():
            rotary.unwrap(layer)
        for module in self.rotaries.values():
            frequencies.unwrap(module)
        for config, name in self.before:
            config._attn_implementation_internal = name
        del self.root.__dict__[_STATE]

    @property
    def host_lengths(self) -> bool:
        """Whether something that serves a layer needs them; before the first packed forward, whether it may."""
        if self.rotaries or getattr(self.decoder.config, "attention_chunk_size", None):
            return True
        mixers = [self.served.get(id(mixer)) for mixer in self.mixers.values()]
        if not all(isinstance(ran, Row) and not ran.needs_lengths for ran in mixers):
            return True
        if self.mixers and not self.attention:
            return False
        names = {select(request, self.implementation) for request in self.requests}
        names = names or set(candidates(execution_device(self.root), self.implementation))
        return any(needs_host_lengths(name) for name in names)

    @property
    def requests(self) -> list[AttentionRequest]:
        """What the layers asked of attention in the last packed forward that left a trace."""
        return [asked for asked in self.served.values() if isinstance(asked, AttentionRequest)]

    def notes(self) -> list[str]:
        """What a user should know about the whole model."""
        notes = [f"route {self.route}: {self.why}"]
        if self.rotaries:
            notes.append("rotary frequencies depend on the longest position and are chosen per document")
        if self.host_lengths:
            notes.append(
                "segment lengths are needed on the host: PackedCollator carries them, and for another collator's "
                "batches they are read from cu_seq_lens_q once per forward"
            )
        return notes

    def _receive(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take the metadata out of the model's arguments, or check that a batch without it is not packed."""
        if getattr(root, "_is_replica", False):
            raise UnsupportedModelError(DATA_PARALLEL)
        kwargs = dict(kwargs)
        self.received = self._take(args, kwargs)
        if self.received is None:
            _refuse_unmarked(root, kwargs)
        return args, kwargs

    def _hand_over(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Put the metadata where the decoder's layers receive it."""
        kwargs = dict(kwargs)
        packed, self.received = self.received, None
        if packed is None:  # not packed, or a loss that calls the decoder itself
            packed = self._take(args, kwargs)
        self.running = packed
        self.reached = set()
        if packed is None:
            return args, kwargs
        if kwargs.get("past_key_values") is not None:
            raise UnsupportedModelError(
                "a packed batch came with past_key_values: prefix tuning and caches cannot be packed, "
                "because every document would need the prefix"
            )
        router.refuse_per_document(self.root, self.mixers.values(), kwargs)
        kwargs["use_cache"] = False  # a cache of several documents in a row is of no use to anybody
        if self.route == "documents":
            kwargs |= {"packed": packed, "attention_mask": None, "position_ids": None}
            return args, kwargs
        if self.compiled and not self.host_lengths:
            packed.lengths = None  # values on the host would be compiled in, one graph per batch
        for request in self.compiled:
            prepare(packed, request, self.implementation)
        rows, row_length = _tokens(args, kwargs).shape[:2]
        kwargs["attention_mask"] = CarriedMask(packed, (rows, row_length), self.implementation)
        if self.mixers:  # some layers hand on what they do not know, some only the argument of fused kernels
            kwargs |= {"packed": packed, "seq_idx": packed}
        return args, kwargs

    def _take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedMetadata | None:
        if not is_packed(kwargs):
            return None
        tokens = _tokens(args, kwargs)
        rows, row_length = tokens.shape[:2]
        packed = take_metadata(
            kwargs, rows=rows, row_length=row_length, device=tokens.device, host_lengths=self.host_lengths
        )
        if kwargs.get("position_ids") is None:
            kwargs["position_ids"] = packed.position_ids.view(rows, row_length)
        return packed

    def _running(self) -> PackedMetadata | None:
        return self.running

    def _reach(self, name: str, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if self.running is not None and not torch.compiler.is_compiling():
            self.reached.add(name)

    def _check_taken(self, root: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The decoder must have run, and taken what the model's hook had for it."""
        if self.received is not None:
            self.received = None
            raise UnsupportedModelError(
                f"{type(root).__name__} does not call its decoder {type(self.decoder).__name__} as a module: "
                "its documents would see each other"
            )

    def _check_served(self, decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Every attention layer that ran must have been handed the metadata."""
        packed, self.running = self.running, None
        if packed is None or torch.compiler.is_compiling():
            return
        if not packed.served and _has_compiled_layers(decoder):
            return  # they leave no trace
        self.served = packed.served
        layers = self.layers
        lost = sorted(name for name in self.reached if id(layers[name]) not in packed.served)
        if lost or not packed.served:
            which = ", ".join(lost[:3]) + ("..." if len(lost) > 3 else "") if lost else "every layer"
            raise UnsupportedModelError(
                f"{type(self.root).__name__} did not hand the segments to {which}: its documents would see each other"
            )


def _decoder(root: Any) -> Any:
    """The model inside the causal language model that embeds the tokens and makes the masks."""
    inner = [m for m in root.modules() if isinstance(m, PreTrainedModel) and m is not root]
    for found in (root.get_decoder(), root.base_model, *inner):
        if isinstance(found, PreTrainedModel) and found is not root:
            return found
    return root


def _own_modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Names and modules inside a model, without those of other models in it (vision, audio)."""
    for name, module in model.named_children():
        if not isinstance(module, PreTrainedModel):
            yield prefix + name, module
            yield from _own_modules(module, f"{prefix}{name}.")


def _has_compiled_layers(decoder: nn.Module) -> bool:
    """Whether modules inside were compiled on their own, ``layer.compile()``."""
    return any(module._compiled_call_impl is not None for module in decoder.modules())


def _is_attention(module: nn.Module) -> bool:
    """Whether the module calls transformers' attention interface."""
    code = getattr(_plain(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _plain(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The tensor that says how many rows and columns the batch has: ids, or embeddings in their place."""
    for candidate in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args):
        if isinstance(candidate, Tensor):
            return candidate
    raise LayoutError("the batch has neither input_ids nor inputs_embeds")


def _refuse_unmarked(root: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise for a batch that looks packed and says nothing of its segments."""
    if kwargs.get("seq_idx") is not None:
        raise LayoutError(f"the batch has seq_idx but no cu_seq_lens_q: {WAY_OUT}")
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if not isinstance(positions, Tensor) or torch.compiler.is_compiling():
        return
    if positions.device.type == "cpu":
        steps = positions[..., 1:] - positions[..., :-1]
        restarts = steps <= 0
        if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[-1] == positions.shape[-1]:
            restarts = restarts & (mask[..., 1:] != 0) & (mask[..., :-1] != 0)
        if bool(restarts.any()):
            raise LayoutError(f"position_ids restart inside a row but the batch carries no segments: {WAY_OUT}")
    elif root.training and mask is None and all(kwargs.get(k) is None for k in ("past_key_values", "cache_params")):
        raise LayoutError(
            f"a training batch on {positions.device.type} came with position_ids and without segments, "
            f"attention_mask or cache, so whether it is packed cannot be told without reading it back: {WAY_OUT}"
        )
