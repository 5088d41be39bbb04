"""The gradients of one batch by the fastest way that is exact for it: what ``make_train_step`` and trainers share.

A batch -> fixed shapes -> the loss without logits, or the model's own -> backward through compiled layers, replayed as
a CUDA graph. What a part cannot do runs as usual, and :attr:`Gradients.parts` says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from traceback import format_exception
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from packing_core.batches.keys import BatchKey
from packing_core.errors import UnsupportedError
from torch_backend.hf.anatomy.structure import causal_lm, sharding_inside
from torch_backend.hf.foreign_kernels import replaced_modules, without_kernels
from torch_backend.hf.forward import DocumentsChoice
from torch_backend.hf.patch import context_of, state_of
from torch_backend.hf.patched import Patched
from torch_backend.hf.quantised import quantised_layers, traceable_weights
from torch_backend.losses.causal_lm import LOSS_WEIGHTS
from torch_backend.steps.boundaries import Host
from torch_backend.steps.compiling import announced, enough_graphs, start_compilers, whole_layers
from torch_backend.steps.cuda_graph import (
    CapturedBackward,
    compile_layers,
    form_of,
    layers_of,
)
from torch_backend.steps.eligibility import (
    Batch,
    compiled_layers,
    has_parents,
    holds_images,
    level_inside,
    loss_without_logits,
    plain_layers,
    why_mixers_wait,
    why_not_captured,
    why_not_compiled,
    why_not_recomputed,
)
from torch_backend.steps.fixed_shapes import FixedShapes
from torch_backend.steps.graph_collectives import Exchange, average_at_the_end, exchange_of, place_of
from torch_backend.steps.memory import Level, level_layers, level_of, recomputed_as_whole, recomputing_inside
from torch_backend.steps.memory_fit import group_on_host, tokens_of
from torch_backend.steps.tiled_layers import Parts, describe_tiles, tiled, tiled_modules

Choice = bool | Literal["auto"]
log = logging.getLogger("crosspack")

LOSS, LAYERS, GRAPH = "loss", "layers", "graph"  # the parts of a step that can be fast
TILES = "tiles"  # and what of a long row runs by tiles


@dataclass(frozen=True)
class StepInputs:
    """One microbatch of a step.

    Attributes:
        batch: keyword arguments of the model, with ``labels``.
        targets: of the whole step, by whose number or weight the loss is divided; None if the loss knows it itself.
    """

    batch: Batch
    targets: Any = None

    def flat(self) -> dict[str, Any]:
        """Returns one mapping, which a CUDA graph takes; see :meth:`of_flat`."""
        return {**self.batch, "targets of the step": self.targets}

    @classmethod
    def of_flat(cls, flat: Batch) -> StepInputs:
        batch = dict(flat)
        targets = batch.pop("targets of the step")
        return cls(batch, targets)


class CompiledLayers(NamedTuple):
    """Layers of a model, compiled for one level of memory.

    Attributes:
        calls: each module with its compiled call.
        recomputed: those that do not keep all that their backward reads.
        requests: of attention, that they know how to run.
        foreign: modules in them that run a library's kernels otherwise.
        quantised: linear layers in them that run as operators.
    """

    calls: dict[nn.Module, Any]
    recomputed: list[Any]
    requests: Any
    foreign: dict[nn.Module, Any]
    quantised: list[nn.Module]


class Gradients:
    """``loss = gradients(inputs)``: adds the gradients of a microbatch to those of the parameters.

    Graphs are recorded for one form of batches at a time: that of the first batch, and later any that comes twice in a
    row. Compiled layers also run batches of as many tokens that differ in their segments, so that no step takes more
    memory than a compiled one. Batches of another size run as usual. Batches with images run no graph: their vision
    tower runs as usual, in front of compiled layers. Layers of documents that are cut over ranks are compiled for any
    number of tokens: as on one rank where each document of a batch lies on one, otherwise around attention,
    convolutions and scans, which exchange other pieces in every batch, and then torch's checkpoint stands around
    layers that recompute. Outside of a call the layers are as they were, so evaluation and generation run as usual too.

    Args:
        model: what is called, with all its wrappers.
        backward: forward and backward as usual; returns the loss without a graph. To be captured it must not read from
            the device, and must reach everything that changes between calls through its inputs.
        choose: (batch, forward) -> why the loss cannot do without logits; None if it does. Called once, on the first
            batch, without gradients and with the random state kept. If ``forward``, it must run the layers, see
            :func:`run_layers`.
        compile, capture: True raises where it is not possible, "auto" says why not.
        no_layers, no_graph: reasons against compiling and capturing that the caller knows.
        fixed: makes batches of one form where shapes must not change.
        fits_whole: (tokens) -> whether such a batch fits where no part of a layer runs by tiles.

    Attributes:
        parts: "loss", "layers" and "graph", each with what runs, or why nothing faster does.
        prepared: whether the first batch has come; why_logits: what ``choose`` said of it.
    """

    def __init__(
        self,
        model: nn.Module,
        backward: Callable[[StepInputs], Tensor],
        choose: Callable[[Batch, bool], str | None],
        *,
        compile: Choice = "auto",
        capture: Choice = "auto",
        no_layers: str | None = None,
        no_graph: str | None = None,
        fixed: FixedShapes | None = None,
        fits_whole: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self.model = model
        self.backward = backward
        self.choose = choose
        self.compile = compile
        self.capture = capture
        self.no_layers, self.no_graph = no_layers, no_graph
        self.shapes = fixed or FixedShapes()
        self.parts = dict.fromkeys((LOSS, LAYERS, GRAPH), "decided at the first step")
        self.prepared = False
        self.why_logits: str | None = None
        # how batches run, which the first one decides; unbound, so that graphs are freed with the last reference
        self.mode: Callable[[Gradients, StepInputs], Tensor] = Gradients._as_usual
        self.of_whole: Any = None  # the requests of attention where documents lie on one rank each; empty for a refusal
        self.images = False  # whether a batch with images has run, so that attention was asked about its spans
        # by the level at which they recompute, and whether each is several graphs between exchanges
        self.layers: dict[tuple[Level, bool], CompiledLayers] = {}
        self.fits_whole = cache(fits_whole)  # asked once for all batches of a size
        self.tiles: tuple[int, Parts] = 0, {}  # parts of layers that the last batch, of so many tokens, ran by tiles
        self.groups: dict[int, int] = {}  # layers that share an input on the host, for batches of so many tokens
        self.host = Host()
        self.form: Any = None  # of the batches that graphs serve
        self.last: Any = None
        self.graphs: CapturedBackward | None = None
        self.weights: Any = None  # where those lie that the graphs use
        self.exchange = Exchange()

    def __call__(self, inputs: StepInputs, *, last: bool = True) -> Tensor:
        """Returns the loss as ``backward`` does."""
        try:
            parts = self._tiled(inputs.batch)
            with tiled(parts):  # the first batch runs through the layers before they are compiled
                if not self.prepared:
                    self._prepare(inputs.batch)
            self.host.group = self._group(inputs.batch)
            with self.exchange.around(last=last), tiled(parts):
                return self.mode(self, inputs)
        except torch.OutOfMemoryError:
            # whoever catches it goes on with smaller batches
            self.graphs = self.form = self.last = None
            self.shapes.forget_rows()
            raise

    @property
    def _patched(self) -> Patched:
        state = state_of(causal_lm(self.model))
        assert state is not None
        return state

    def _tiled(self, batch: Batch) -> Parts:
        """The parts of layers that this batch computes by tiles, as modules are now."""
        given = batch.get("input_ids")
        tokens = 0 if given is None else given.numel()
        parts = tiled_modules(self.model, tokens, self.fits_whole)
        if (tokens, parts) != self.tiles:
            self.tiles = tokens, parts
            if (what := describe_tiles(self.model, tokens, self.fits_whole)) is not None:
                self.parts[TILES] = what
        return parts

    def _group(self, batch: Batch) -> int:
        """Layers that share an input on the host; asked once for all batches of a size."""
        if not self.compile or level_inside(self.model) != "offload":
            return 1
        tokens = tokens_of(batch)
        if tokens not in self.groups:
            self.groups[tokens] = group_on_host(self.model, tokens, self.host.held)
        return self.groups[tokens]

    def _as_usual(self, inputs: StepInputs) -> Tensor:
        return self.backward(inputs)

    def _of_pieces(self, inputs: StepInputs) -> Tensor:
        """Through compiled layers. What fails on one rank is raised there: trying again, it would exchange alone."""
        share = inputs.batch.get(BatchKey.SHARE)  # straddles on all ranks alike
        whole = share is not None and not share.straddles and self._run_whole(inputs.batch)
        if not whole and level_of(self.model) == "selective":
            return self.backward(inputs)
        with self._compiled(crosses=not whole, requests=self.of_whole if whole else None):
            return self.backward(inputs)

    def _run_whole(self, batch: Batch) -> bool:
        """Returns whether compiled layers run documents that lie on one rank each as on one rank; asks them once."""
        if self.of_whole is None:
            with torch.random.fork_rng(_cuda_devices()), torch.no_grad():
                run_layers(self.model, batch)
            state = self._patched
            several = any(isinstance(choice, DocumentsChoice) for choice in state.choices.values())
            refused = state.layers_need_lengths or several or why_mixers_wait(self.model) is not None
            self.of_whole = set() if refused else {replace(each, requires_grad=True) for each in state.requests}
            self.parts[LAYERS] = self._compiled_how()
        return bool(self.of_whole)

    def _by_form(self, inputs: StepInputs) -> Tensor:
        """In fixed shapes: as a graph, through compiled layers or as usual."""
        if has_parents(inputs.batch) and not self.shapes.forests:
            return self.backward(inputs)
        inputs, state = replace(inputs, batch=self.shapes(inputs.batch)), self._patched
        selects = state.selects(inputs.batch)
        if (budget := state.anatomy.budget) is not None and not selects:  # a graph is not told the lengths
            inputs = replace(inputs, batch={**inputs.batch, BatchKey.WITHIN: budget})
        form, images = form_of(inputs.flat()), holds_images(inputs.batch)
        together = self.exchange.same((form, bool(self.capture), selects))
        if together and (self.form is None or (form == self.last and not images)):
            self.form = form
        self.last = form if together else None
        asked, self.images = self.images or not images, self.images or images
        if selects or self.form is None or form["input_ids"] != self.form["input_ids"] or not asked:
            return self.backward(inputs)
        graph = together and self.capture and form == self.form and not images
        return self._through_layers(inputs, self._captured if graph else None)

    def _through_layers(self, inputs: StepInputs, run: Callable[[StepInputs], Tensor] | None = None) -> Tensor:
        """``run``, or ``backward``, with compiled layers, or with plain ones if these turn out not to compile."""
        run = run or self.backward
        if not self.compile:
            return run(inputs)
        started = any(parameter.grad is not None for parameter in self.model.parameters())
        first = nullcontext() if self.layers else announced("first batch through compiled layers")
        try:
            with first, self._compiled():
                return run(inputs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            if self.compile != "auto" or started:
                raise
            for parameter in self.model.parameters():
                parameter.grad = None
            self.parts[LAYERS] = plain_layers(self.model, f"it failed, {error}".splitlines()[0])
            log.warning("the training step runs with layers that are not compiled: %s", error)
            self.compile, self.layers, self.graphs = False, {}, None
            if (reason := why_not_recomputed(self.model, compiled=False)) is None:
                return run(inputs)
            self.capture, self.parts[GRAPH] = False, f"no CUDA graph: {reason}"
            return self.backward(inputs)

    @contextmanager
    def _compiled(self, *, crosses: bool = False, requests: Any = None) -> Iterator[None]:
        """Inside, the layers are compiled.

        Args:
            crosses: whether they exchange with other ranks, between their graphs.
            requests: of attention, in place of those that came before the layers were compiled.
        """
        state = self._patched
        # torch's checkpoint around a layer in parts draws random numbers again, as its backward graph would not
        level = level_of(self.model) if crosses else level_inside(self.model)
        in_parts = crosses and level != "none"
        compiled = self.layers.get((level, in_parts)) or self._compile(level, in_parts=in_parts)
        for module, call in compiled.calls.items():
            module._compiled_call_impl = call
        # between the graphs of pieces attention runs as usual
        state.compiled = set() if crosses else requests or compiled.requests
        state.crosses = crosses
        self.host.begin()
        try:
            with (
                whole_layers(),
                enough_graphs(),
                recomputing_inside(compiled.recomputed),
                without_kernels(compiled.foreign),
                traceable_weights(compiled.quantised),
            ):
                yield
        finally:
            for module in compiled.calls:
                module._compiled_call_impl = None
            state.compiled, state.crosses = set(), False
            self.host.begin()  # free what a backward left

    def _compile(self, level: Level, *, in_parts: bool) -> CompiledLayers:
        """The layers compiled for a level at which they recompute; ``in_parts`` with exchanges between their graphs."""
        state = self._patched
        # blocks of a vision tower stay under torch's checkpoint, inside or outside of their graphs
        recomputed: list[Any] = [] if level == "none" else level_layers(state.decoder)
        foreign, quantised = replaced_modules(layers_of(state.decoder)), quantised_layers([state.root])
        dynamic = False if self.mode is Gradients._by_form else None
        compile_layers(self.model, memory="none" if in_parts else level, dynamic=dynamic)
        calls = {m: m._compiled_call_impl for m in self.model.modules() if m._compiled_call_impl is not None}
        if in_parts:
            calls |= {m: recomputed_as_whole(calls[m], level) for m in recomputed if m in calls}
        elif level == "offload":
            calls |= {m: self.host.around(calls[m]) for m in recomputed if m in calls}
        found = self.layers[level, in_parts] = CompiledLayers(calls, recomputed, state.compiled, foreign, quantised)
        return found

    def _captured(self, inputs: StepInputs) -> Tensor:
        weights = [(place_of(p), p.requires_grad) for p in self.model.parameters()]
        if self.graphs is None or (weights, self.form) != self.weights:
            self.weights = weights, self.form
            self.graphs = CapturedBackward(self._recorded, [p for p in self.model.parameters() if p.requires_grad])
        before = [parameter.grad for parameter in self.graphs.parameters]
        try:
            return self.graphs(inputs.flat())
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if self.capture is True or not self.graphs.recording:
                raise
            if not self.exchange.repeats:
                raise UnsupportedError(
                    "a CUDA graph of this model could not be recorded, and FSDP2 cannot go on from there: pass "
                    "capture=False to make_train_step, or fast=False to enable_packing"
                ) from error
            self.parts[GRAPH] = f"none: recording it failed, {error}".splitlines()[0]
            # as text: the error holds the frames of the recording, and these hold all activations
            log.warning("the training step runs without a CUDA graph: %s", "".join(format_exception(error)).rstrip())
        for parameter, gradient in zip(self.graphs.parameters, before, strict=True):
            parameter.grad = gradient  # a recording runs nothing, so the values are those from before
        self.capture, self.graphs = False, None
        return self.backward(inputs)

    def _recorded(self, flat: Batch) -> Tensor:
        loss = self.backward(StepInputs.of_flat(flat))
        self.exchange.end_recording()
        return loss

    def _compiled_how(self) -> str:
        any_length, pieces = self.mode is Gradients._through_layers, self.mode is Gradients._of_pieces
        return compiled_layers(self.model, any_length=any_length, pieces=pieces, whole=bool(self.of_whole))

    def _prepare(self, batch: Batch) -> None:
        """Choose what is fast, and try the loss on the first batch."""
        layers = _refused("compile", self.compile, self.no_layers or why_not_compiled(self.model, batch))
        graph = self.no_graph or why_not_captured(self.model, batch, insists=self.capture is True)
        graph = _refused("capture", self.capture, graph or why_not_recomputed(self.model, compiled=layers is None))
        forests, pieces = has_parents(batch), layers is None and context_of(self.model) is not None
        fixed = not pieces and (graph is None or (layers is None and not forests))
        self.shapes.forests, self.images = fixed and forests, holds_images(batch)
        if layers is None:
            start_compilers()
        with torch.random.fork_rng(_cuda_devices()), torch.no_grad():
            self.why_logits = self.choose(self.shapes(batch) if fixed else batch, layers is None)
        reason, state = why_mixers_wait(self.model) if fixed else None, state_of(causal_lm(self.model))
        if reason is None and forests and state is not None:
            reason = state.why_no_compiled_forest(state.requests)
        if reason is not None:
            layers = layers or _refused("compile", self.compile, reason)
            graph = graph or _refused("capture", self.capture, reason)
            fixed = False
        if context_of(self.model) is not None:
            average_at_the_end(self.model)
        if self.capture:
            self.exchange, graph = exchange_of(self.model, graph)
            graph = _refused("capture", self.capture, graph)
            self.shapes.largest = self.exchange.largest
        if fixed:
            self.mode = Gradients._by_form
        elif layers is None:
            self.mode = Gradients._of_pieces if pieces else Gradients._through_layers
        self.parts |= {
            LOSS: loss_without_logits(self.model) if self.why_logits is None else f"with logits: {self.why_logits}",
            LAYERS: self._compiled_how() if layers is None else plain_layers(self.model, layers),
            GRAPH: "CUDA graph" if graph is None else f"no CUDA graph: {graph}",
        }
        self.compile, self.capture = layers is None and self.compile, graph is None and self.capture
        self.prepared = True


def run_layers(model: nn.Module, batch: Batch) -> None:
    """Run the decoder of a model, so that each layer asks the attention implementations.

    They cannot be asked inside a compiled layer.
    """
    names = ("labels", "shift_labels", LOSS_WEIGHTS)
    whole = sharding_inside(model) == "FSDP" or holds_images(batch)
    state = None if whole else state_of(causal_lm(model))
    run = model if state is None else state.decoder  # which makes no logits
    run(**{name: x for name, x in batch.items() if name not in names})


def _refused(name: str, choice: Choice, reason: str | None) -> str | None:
    """Explains why a part is not fast, None if it is.

    Raises:
        UnsupportedError: the caller insists on what is not possible.
    """
    if choice is True and reason is not None:
        raise UnsupportedError(f"{name}=True is not possible, because {reason}: leave {name} out", option=name)
    return f"{name}=False" if choice is False else reason


def _cuda_devices() -> list[int]:
    return [torch.cuda.current_device()] if torch.cuda.is_available() else []
