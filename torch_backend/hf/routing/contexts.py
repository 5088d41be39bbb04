"""The contexts in which forwards are recorded or replayed: what they install, refuse and check."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from packing_core.errors import LayoutError, UnsupportedError, UnsupportedModelError
from torch_backend.hf.anatomy.structure import causal_lm, decoder_of, has_compiled_layers
from torch_backend.hf.override import original_class
from torch_backend.hf.routing.call import RoutedCall, begin, checkpointed, end, overridden
from torch_backend.hf.routing.choice import TopK
from torch_backend.hf.routing.record import RoutingRecord

_ROUTER = re.compile(r"(?<!Hash)Router$|TopKGating$|Mo[Ee]\w*Gate$")  # hashed experts follow from the token alone
_ACTIVE = "_crosspack_routing"
# Attributes by which transformers' layers, and FSDP's wrapper of layers, call what checkpoints them.
_CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")


@contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingRecord]:
    """Record the experts of every forward inside; no result changes.

    Args:
        model: a transformers model with routers, patched or not, in wrappers or not.

    Yields:
        A record, on the model's device, which grows by the documents of each forward.

    Raises:
        UnsupportedModelError: the model has no routers, or they do not rank experts by ``topk``; they run per document;
            layers are compiled.
        UnsupportedError: the model is recorded or replayed already.
        LayoutError: no forward ran inside.
    """
    session = _Session(model, None)
    with session.installed():
        yield session.record
    if not len(session.record):
        raise LayoutError(
            f"no forward of {session.name} ran inside record_routing. A captured step (make_train_step, a trainer's "
            "fast step) does not call the model: record its forward outside of the step"
        )


@contextmanager
def replay_routing(model: nn.Module, record: RoutingRecord) -> Iterator[None]:
    """Let the forwards inside take the experts of a record, document by document, in its order.

    Routing weights come from the present scores of the recorded experts, and gradients flow through them. Where a
    router chooses groups of experts first, it chooses those of the recorded experts. Padding is routed as ever.

    Args:
        model: as for :func:`record_routing`.
        record: of this model, or of one with the same routers, such as the weights of an earlier step. The documents
            may lie in other rows than when they were recorded.

    Raises:
        UnsupportedModelError, UnsupportedError: as for :func:`record_routing`; or layers are checkpointed by something
            other than transformers or FSDP, and would not take the same experts in the backward.
        LayoutError: the record is of another model, or its documents are not those of the batch, before any layer with
            experts runs; or documents are left over in the end.
    """
    session = _Session(model, record)
    with session.installed():
        yield
    if session.taken < len(record):
        raise LayoutError(
            f"the forwards inside replay_routing had {session.taken} documents and the record has {len(record)}: "
            "replay those of the batches alone, record.select(order)"
        )


class _Session:
    """The forwards inside one context.

    Attributes:
        record: what is recorded, or what is replayed.
        replays: which of both.
        taken: documents replayed so far.
        choices: how each router chooses, as far as that is known.
        bounds: of each router in what is replayed, its highest expert, and how many experts every token has.
    """

    def __init__(self, model: nn.Module, record: RoutingRecord | None) -> None:
        self.root = causal_lm(model)
        self.name = type(self.root).__name__
        self.decoder = decoder_of(self.root)
        self.routers = _routers(self.decoder)
        if not self.routers:
            raise UnsupportedModelError(
                f"{self.name} has no routers whose choice could be recorded: leave record_routing out"
            )
        if has_compiled_layers(self.decoder):
            raise UnsupportedModelError(
                f"the layers of {self.name} are compiled, and routing is recorded and replayed in eager layers alone: "
                "leave out layer.compile() and the fast step"
            )
        self.names = {id(router): name for name, router in self.routers.items()}
        self.replays = record is not None
        self.record = RoutingRecord(tuple(self.routers)) if record is None else record
        self.taken = 0
        self.choices = dict(self.record.choices) if self.replays else self.record.choices
        self.bounds = self._check_record() if self.replays else {}
        for name, choice in self.choices.items():
            self.check_experts(name, choice)

    def _check_record(self) -> dict[str, tuple[int, int]]:
        found, own = self.record.routers, tuple(self.routers)
        if found != own:
            raise LayoutError(
                f"the record is of another model: its routers are {_listed(found)}, those of {self.name} "
                f"{_listed(own)}; record this one"
            )
        documents = self.record.documents
        if not documents:
            raise LayoutError("the record has no documents: run a forward inside record_routing first")
        for number, document in enumerate(documents):
            if document.ndim != 3 or document.shape[1] != len(own) or document.is_floating_point():
                raise LayoutError(
                    f"document {number} of the record must be integers [L, {len(own)} routers, K], got "
                    f"{document.dtype} {list(document.shape)}"
                )
        highest = torch.stack([document.amax((0, 2)) for document in documents]).amax(0)
        filled = torch.stack([(document >= 0).all(0).sum(-1) for document in documents]).amin(0)
        found_in = torch.stack([highest.long(), filled]).tolist()  # one read from the device
        return dict(zip(own, zip(*found_in)))

    def check_experts(self, name: str, choice: TopK) -> None:
        """Raise if the record's experts are not such as a router can choose."""
        highest, filled = self.bounds[name]
        if filled < choice.top_k:
            raise LayoutError(
                f"the record has {filled} experts of each token for {name}, which takes {choice.top_k}: it is of "
                "another model, so record this one"
            )
        if highest >= choice.experts:
            raise LayoutError(
                f"the record has expert {highest} for {name}, which has {choice.experts}: it is of another model, "
                "so record this one"
            )

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, forwards of the model are recorded or replayed."""
        if _ACTIVE in self.root.__dict__:
            raise UnsupportedError(f"the routing of {self.name} is recorded or replayed already: leave that context")
        checkpoints = [
            (module, name, module.__dict__[name])
            for module in self.root.modules()
            for name in _CHECKPOINTS
            if self.replays and name in module.__dict__  # what is recorded needs nothing in the backward
        ]
        hooks = [
            self.decoder.register_forward_pre_hook(self._begin, with_kwargs=True),
            self.decoder.register_forward_hook(self._end, always_call=True),
        ]
        self.root.__dict__[_ACTIVE] = True
        for module, name, checkpoint in checkpoints:
            setattr(module, name, partial(checkpointed, checkpoint))
        try:
            with overridden(self.routers.values()):
                yield
        finally:
            for module, name, checkpoint in checkpoints:
                setattr(module, name, checkpoint)
            del self.root.__dict__[_ACTIVE]
            for hook in hooks:
                hook.remove()

    def _begin(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        past = kwargs.get("past_key_values")
        if past is not None and past.get_seq_length() > 0:
            raise UnsupportedModelError(
                f"{self.name} goes on from a cache, and the routing of whole documents is recorded: call the model on "
                "them without past_key_values"
            )
        given = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        rows, length = next(x for x in given if x is not None).shape[:2]
        begin(RoutedCall(self, (rows, length), kwargs.get("attention_mask")))

    def _end(self, decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        end(complete=output is not None)  # None after an error

    def take(self, lengths: Sequence[int]) -> list[Tensor]:
        """The next documents of the record, which must have these lengths."""
        documents = self.record.documents[self.taken : self.taken + len(lengths)]
        if len(documents) < len(lengths):
            raise LayoutError(
                f"the batch has {len(lengths)} documents and {len(documents)} of the record's {len(self.record)} are "
                "left: record the routing of all documents that are replayed"
            )
        for number, (document, length) in enumerate(zip(documents, lengths), self.taken):
            if len(document) != length:
                raise LayoutError(
                    f"document {number} of the record has {len(document):,} tokens and the batch's document in its "
                    f"place has {length:,}: put the record in the order of the batch, record.select(order)"
                )
        self.taken += len(lengths)
        return documents


def _routers(decoder: nn.Module) -> dict[str, nn.Module]:
    """The modules of a decoder that choose experts, by name, which is the same with and without adapters of PEFT.

    A router, or the module around it where that one ranks what the router scores (DBRX).
    """
    modules, found = dict(decoder.named_modules()), {}
    for name, module in modules.items():
        if _ROUTER.search(original_class(module).__name__):
            around = name.rpartition(".")[0]
            name = around if _ranks(modules[around]) and not _ranks(module) else name
            found[name.replace(".base_layer", "")] = modules[name]
    return found


def _ranks(module: nn.Module) -> bool:
    """Returns whether a method of a module's own class calls ``topk``."""
    functions = (getattr(x, "__code__", None) for x in vars(original_class(module)).values())
    return any("topk" in code.co_names for code in functions if code is not None)


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:2])}{', ...' if len(names) > 2 else ''} ({len(names)})"
