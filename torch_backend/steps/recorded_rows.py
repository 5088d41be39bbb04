"""CUDA graphs for packed calls whose rows differ in length: one of the forward and one of the backward.

A packed call of a decoder -> its row, padded to one of few lengths, in memory that graphs read -> the graph of the
forward -> the last hidden states -> head, loss and metrics, whatever they are, as usual -> the graph of the backward,
which adds to the gradients of the parameters.

So a trainer's own loss may read from the device and differ from step to step, while the layers cost the host two
launches. A pooler runs as usual too, on the documents. The padding is segments of its own behind the documents; its
hidden states are dropped and get no gradient.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from traceback import format_exception
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from packing_core.storage.forest import depth_of
from torch_backend.hf.edits.packed_experts import why_experts_read
from torch_backend.hf.forward import PackedForward
from torch_backend.hf.patched import Patched
from torch_backend.segments import PackedMetadata
from torch_backend.steps.cuda_graph import record
from torch_backend.steps.eligibility import HOOKS_READ, reads_gradients, why_not_recomputed
from torch_backend.steps.fixed_shapes import power_of_two
from torch_backend.steps.graph_collectives import place_of
from torch_backend.steps.static_row import RowForm, Run, StaticRow, tensors_of

log = logging.getLogger("crosspack")

PARTS = 16  # lengths of rows between a power of two and the next: padding is at most a sixteenth of a row
OFTEN = 4  # times that a form comes before it has graphs of its own, where longer ones can serve it
MOST_PADDED = 1.25  # times its tokens may be those of a row whose graphs serve it
MOST_WAITED = 3.0  # times the host's time of a call may be the device's where a graph is worth its recording
CHANGED = "the activations of this call were overwritten by a later one: call backward once, before the next call"


class RecordedRows:
    """Runs packed calls of one patched decoder as CUDA graphs, a pair for every :class:`RowForm`.

    The first call of a form runs as usual, the second one is recorded, unless the first kept the device busy for much
    longer than the host: a graph would save little there, and recording and padding cost. Where graphs of longer rows
    can serve a form, they do until it has come :data:`OFTEN`. Graphs of one model share their memory, so while the
    backward of a call is to come, the next one with gradients runs as usual.

    Args:
        model: what is called, with all its wrappers.

    Attributes:
        refused: why nothing is recorded; None while it is.
    """

    def __init__(self, model: nn.Module, state: Patched) -> None:
        self.model, self.state = model, state
        self.refused = why_no_graphs(model)
        self.entries = self.longest = self.depth = 0
        self.graphs: dict[Any, dict[int, RowGraphs]] = {}  # by the tokens of a row, for each of all else
        self.timers: dict[Any, CallTimer] = {}  # of calls as usual
        self.seen: Counter[Any] = Counter()
        self.memory = GraphMemory()
        self.structure: Any = None
        self.modules: list[nn.Module] = []
        self.tuners: list[Any] = []
        self.kind: Any = tuple  # of the decoder's output
        self.hidden = torch.empty(0)  # of the dtype and width of its hidden states

    @property
    def is_unneeded(self) -> bool:
        """Returns whether nothing is recorded because the device does not wait for the host."""
        timed = [timer for timer in self.timers.values() if timer.has_ended]
        return not any(self.graphs.values()) and any(not timer.waited for timer in timed)

    def __call__(self, run: Run, forward: PackedForward, kwargs: dict[str, Any]) -> Any:
        """The output of ``run(forward, kwargs)``."""
        with _autocast_without_cache():
            return self._call(run, forward, kwargs)

    def _call(self, run: Run, forward: PackedForward, kwargs: dict[str, Any]) -> Any:
        segments = forward.segments
        arguments = {name: x for name, x in kwargs.items() if name != "attention_mask"}
        if self.refused is not None or not _fits(forward, arguments):
            return run(forward, kwargs)
        form, around = self._form(segments), self._surroundings(arguments)
        if self.refused is not None:
            return run(forward, kwargs)
        forward.handed_over = True
        graphs = self._graphs_for(form, around, run, arguments, segments)
        if graphs is not None:
            graphs.row.take(arguments, segments)
            forward.pools_after = graphs.row.pools
            return _with_hidden(self.kind, graphs(segments.tokens))
        timer = self.timers.get((form, around))
        if timer is not None and timer.has_ended and not timer.waited:
            return run(forward, kwargs)
        with CallTimer() as self.timers[form, around]:
            output = (row := StaticRow(self.state, form, arguments, segments)).run(run)
        if (hidden := _only_hidden(output)) is None:
            self.refused = "its decoder returns more than the last hidden states"
            return run(forward, kwargs)
        forward.pools_after = row.pools
        self.kind, self.hidden = type(output), hidden.new_empty(0, hidden.shape[2])
        return _with_hidden(self.kind, hidden[:, : segments.tokens])

    def _graphs_for(
        self, form: RowForm, around: Any, run: Run, arguments: dict[str, Any], segments: PackedMetadata
    ) -> RowGraphs | None:
        """The graphs of a call; None where it has to run as usual."""
        if torch.is_grad_enabled() and self.memory.busy:
            return None
        recorded = self.graphs.setdefault((replace(form, tokens=0), around), {})
        if (graphs := recorded.get(form.tokens)) is not None:
            return graphs
        self.seen[form, around] += 1
        longer = [tokens for tokens in recorded if tokens > form.tokens]
        if longer and min(longer) <= MOST_PADDED * form.tokens and self.seen[form, around] < OFTEN:
            return recorded[min(longer)]
        timer = self.timers.get((form, around))  # kernels are compiled and chosen in a call like it, and its backward
        if timer is None or not timer.has_ended or not timer.waited:
            return None
        return self._record(recorded, run, StaticRow(self.state, form, arguments, segments))

    def _record(self, recorded: dict[int, RowGraphs], run: Run, row: StaticRow) -> RowGraphs | None:
        try:
            self.memory.reserve(row.form.tokens, self.hidden)
            recorded[row.form.tokens] = RowGraphs(row, run, self.memory)
        except RuntimeError as error:  # for lack of memory too
            self.refused = f"recording it failed, {error}".splitlines()[0]
            self.graphs.clear()
            self.memory = GraphMemory()
            # as text: the error holds the frames of the recording, and these hold all activations
            log.warning("packed calls run without CUDA graphs: %s", "".join(format_exception(error)).rstrip())
            return None
        return recorded[row.form.tokens]

    def _form(self, segments: PackedMetadata) -> RowForm:
        """The form of a row. Sizes other than its tokens only grow, and then all graphs are recorded again.

        So rows without shared prefixes run as rows with them once there was one, or one that had some but shared too
        little: layers are compiled once for both.
        """
        assert segments.lengths is not None
        tokens, before = segments.tokens, (self.entries, self.longest, self.depth)
        step = max(64, (1 << (tokens.bit_length() - 1)) // PARTS)
        rounded = -(-tokens // step) * step
        self.longest = max(self.longest, power_of_two(segments.max_seqlen))
        longest = min(self.longest, rounded)
        most = int(MOST_PADDED * tokens) - tokens + step  # padding, in pieces of the longest
        entries = len(segments.lengths) + -(-most // longest)
        self.entries = max(self.entries, -(-entries // 16) * 16)
        if segments.parents is not None or self._may_share:
            self.depth = max(self.depth, power_of_two(max(1, depth_of(segments.parents or ()))))
        if before != (self.entries, self.longest, self.depth):
            self.graphs.clear()
            self.memory.pools.clear()  # which end with their last graph
        return RowForm(rounded, self.entries, longest, self.depth)

    @property
    def _may_share(self) -> bool:
        """Returns whether documents of some row had a common beginning that was too short to share."""
        unpadding = self.state.unpadding
        return unpadding is not None and unpadding.prefixes is not None and unpadding.prefixes.declined is not None

    def _surroundings(self, arguments: Mapping[str, Any]) -> Any:
        """Returns what a graph depends on beside the values of its row."""
        cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        if self.structure is not self.state.structure:  # renewed by the call's entry where the model has changed
            self.structure, self.modules = self.state.structure, list(self.model.modules())
            self.tuners = [m for m in self.modules if hasattr(m, "_disable_adapters")]  # of PEFT
        adapters = tuple((m._disable_adapters, str(m.active_adapters), getattr(m, "merged", None)) for m in self.tuners)
        parameters = [p for m in self.modules for p in m._parameters.values() if p is not None]
        if reads_gradients(parameters):
            self.refused = HOOKS_READ
        weights = tuple((place_of(p), p.requires_grad) for p in parameters)
        constants = tuple((name, x) for name, x in arguments.items() if not isinstance(x, Tensor))
        shapes = tuple((name, x.dtype) for name, x in tensors_of(arguments))
        return torch.is_grad_enabled(), self.model.training, cast, adapters, weights, constants, shapes


class GraphMemory:
    """Holds what the graphs of one model share: memory, a stream, gradients of its parameters, hidden states.

    Attributes:
        pools: of graphs with gradients and of those without, which run between a forward and its backward.
    """

    def __init__(self) -> None:
        self.pools: dict[bool, Any] = {}
        self.stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self.gradients: dict[nn.Parameter, Tensor] = {}
        self.hidden: dict[int, Tensor] = {}
        self._call: weakref.ref[PendingCall] | None = None

    def pool(self, *, gradients: bool) -> Any:
        """Returns the memory of graphs with gradients, or of those without."""
        if gradients not in self.pools and torch.cuda.is_available():
            self.pools[gradients] = torch.cuda.graph_pool_handle()
        return self.pools.get(gradients)

    @property
    def busy(self) -> bool:
        """Returns whether the backward of a call is to come, which reads what its forward left."""
        call = None if self._call is None else self._call()
        return call is not None and call.pending

    def begin(self) -> PendingCall:
        """Note a call, whose activations lie in the memory from now on."""
        call = PendingCall()
        self._call = weakref.ref(call)
        return call

    def is_current(self, call: PendingCall) -> bool:
        """Returns whether the activations of a call still lie in the memory."""
        return self._call is not None and self._call() is call

    def reserve(self, tokens: int, hidden: Tensor) -> None:
        """Make memory for hidden states [1, T, D] and their gradients; none can be made while graphs are recorded.

        Args:
            hidden: [0, D] like them.
        """
        room = power_of_two(tokens)
        if room not in self.hidden:
            self.hidden[room] = hidden.new_zeros(2, room, hidden.shape[1])

    def states(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Memory for hidden states and for their gradients, the same for rows of up to the next power of two."""
        states, gradients = self.hidden[power_of_two(tokens)].split(1)
        return states[:, :tokens], gradients[:, :tokens]

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """Returns the tensor in which graphs add to the gradient of a parameter."""
        if parameter not in self.gradients:
            self.gradients[parameter] = torch.zeros_like(parameter)
        return self.gradients[parameter]

    def put_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Let the gradients of parameters, whatever they are, lie where graphs add to them."""
        empty = []
        for parameter in parameters:
            kept, gradient = self.gradient(parameter), parameter.grad
            if gradient is None:
                empty.append(kept)
            elif gradient is not kept:
                kept.copy_(gradient)
            parameter.grad = kept
        if empty:
            torch._foreach_zero_(empty)


class CallTimer:
    """Times what a ``with`` block queues: the host's seconds and, without waiting for it, the device's."""

    def __enter__(self) -> CallTimer:
        on_gpu = torch.cuda.is_available()
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu else []
        for event in self.events[:1]:
            event.record()
        self.began, self.seconds = time.perf_counter(), 0.0
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self.began
        for event in self.events[1:]:
            event.record()

    @property
    def has_ended(self) -> bool:
        """Returns whether the device has done all of it."""
        return all(event.query() for event in self.events)

    @property
    def waited(self) -> bool:
        """Returns whether the device waits for the host in such calls, or in their losses, which graphs spare it."""
        if not self.events:
            return True
        begin, end = self.events
        return begin.elapsed_time(end) / 1_000 < MOST_WAITED * self.seconds


class PendingCall:
    """A call with gradients, until its backward ran or nothing can call it any more."""

    def __init__(self) -> None:
        self.pending = True


class RowGraphs:
    """``hidden = graphs(tokens)``: the last hidden states of the first tokens of a row.

    Attributes:
        trained: parameters to whose gradients the backward adds; empty for calls without gradients.

    Raises:
        RuntimeError: the layers do what no graph can record.
    """

    def __init__(self, row: StaticRow, run: Run, memory: GraphMemory) -> None:
        self.row, self.run, self.memory = row, run, memory
        self.states, self.gradients = memory.states(row.form.tokens)
        self.output: Tensor | None = None
        self.trained: list[nn.Parameter] = []
        options = {"pool": memory.pool(gradients=torch.is_grad_enabled()), "stream": memory.stream}
        try:
            self.forward, _ = record(self._forward, **options)
            if self.output is not None and self.output.grad_fn is not None:
                self.trained = _leaves(self.output.grad_fn)
                before = [parameter.grad for parameter in self.trained]
                memory.put_gradients(self.trained)
                try:
                    self.backward, _ = record(self._backward, **options)
                finally:
                    for parameter, gradient in zip(self.trained, before, strict=True):  # a recording changes no value
                        parameter.grad = gradient
        finally:
            self.output = None  # whose memory the next recording may use

    def _forward(self) -> None:
        output = self.row.run(self.run)
        self.output = output[0] if isinstance(output, tuple) else output.last_hidden_state
        self.states.copy_(self.output.detach())

    def _backward(self) -> None:
        assert self.output is not None
        torch.autograd.backward(self.output, self.gradients)

    def __call__(self, tokens: int) -> Tensor:
        if self.trained:
            hidden: Tensor = _Replay.apply(torch.empty(0, requires_grad=True), self, tokens)
            return hidden
        self.forward.replay()
        return self.states[:, :tokens].clone()


class _Replay(torch.autograd.Function):
    """The hidden states of a recorded call; its backward adds to the parameters' gradients itself."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, graphs: RowGraphs, tokens: int) -> Tensor:
        ctx.graphs, ctx.tokens, ctx.call = graphs, tokens, graphs.memory.begin()
        graphs.forward.replay()
        return graphs.states[:, :tokens].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        graphs, call = ctx.graphs, ctx.call
        if not call.pending or not graphs.memory.is_current(call):
            raise RuntimeError(CHANGED)
        graphs.gradients[:, : ctx.tokens].copy_(gradient)
        graphs.gradients[:, ctx.tokens :].zero_()
        graphs.memory.put_gradients(graphs.trained)
        graphs.backward.replay()
        call.pending = False
        return None, None, None


def why_no_graphs(model: nn.Module) -> str | None:
    """Explains why packed calls of a model whose layers are compiled run without CUDA graphs; None if they do not."""
    if dist.is_initialized():
        return "its gradients are averaged over ranks in hooks"
    return why_not_recomputed(model, compiled=True) or why_experts_read(model)


def _fits(forward: PackedForward, arguments: Mapping[str, Any]) -> bool:
    """Returns whether a call has nothing but values of tokens and constants."""
    segments = forward.segments
    if segments.lengths is None or segments.spans is not None or segments.keys is not None or forward.over_ranks:
        return False
    if forward.blank or forward.image_sizes or forward.encoded is not None:
        return False
    for _, x in tensors_of(arguments):
        per_token = x.shape[:2] == (1, segments.tokens) or (x.ndim == 3 and x.shape[1:] == (1, segments.tokens))
        if not per_token or x.requires_grad:
            return False
    return all(isinstance(x, Tensor | bool | int | float | str | None) for x in arguments.values())


def _only_hidden(output: Any) -> Tensor | None:
    """Returns the last hidden states of a decoder's output; None if it has something else too."""
    values = [x for x in (output if isinstance(output, tuple) else output.values()) if x is not None]
    return values[0] if len(values) == 1 and isinstance(values[0], Tensor) else None


def _with_hidden(kind: Any, hidden: Tensor) -> Any:
    """Returns a decoder's output of a kind."""
    return (hidden,) if kind is tuple else kind(last_hidden_state=hidden)


def _leaves(node: Any) -> list[nn.Parameter]:
    """Returns the parameters that a backward reaches from a node of its graph."""
    nodes, seen = [node], {node: None}
    while nodes:
        more = [each for each, _ in nodes.pop().next_functions if each is not None and each not in seen]
        seen |= dict.fromkeys(more)
        nodes += more
    return [each.variable for each in seen if hasattr(each, "variable")]


@contextmanager
def _autocast_without_cache() -> Iterator[None]:
    """Autocast as it is, without the casts of weights that were made outside of a recording.

    Calls that are not recorded run in it too: compiled code is guarded on it, and none is compiled in a recording.
    """
    if not torch.is_autocast_enabled("cuda"):
        yield
        return
    with torch.autocast("cuda", dtype=torch.get_autocast_dtype("cuda"), cache_enabled=False):
        yield
