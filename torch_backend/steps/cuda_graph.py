"""A training step of fixed shapes as one CUDA graph: no launch gaps, nothing left for the host to do.

    compile_layers(model)                                  # optional: fewer passes over memory, fewer activations kept
    step = CapturedStep(lambda batch: ..., warm_up=3)      # forward, backward, optimizer; returns tensors
    for batch in loader:
        loss = step(batch)

Every call is one real step. The first ``warm_up`` calls run as usual (they compile kernels and make optimizer state),
the next one is recorded and every later one replayed. A graph needs fixed shapes (``PackedCollator`` with a capacity,
``max_seqlen`` and ``bucket``), segment boundaries on the device alone, and an optimizer made ``capturable``, its
learning rate a tensor if it is scheduled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from packing_core.batches.keys import BatchKey
from packing_core.errors import LayoutError, UnsupportedModelError
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.attention import DecoderLayer
from torch_backend.hf.forward import forward_among
from torch_backend.hf.patch import state_of
from torch_backend.steps.adapter_products import with_joined_adapters
from torch_backend.steps.compiling import announced
from torch_backend.steps.float8_scales import SCALES_ONCE
from torch_backend.steps.memory import Level, marked
from torch_backend.steps.tower_blocks import compile_towers

# Host values that follow a batch around; inside a graph they would stay those of the batch that was recorded.
DEVICE = "cuda"


def compile_layers(
    model: nn.Module,
    *,
    recompute: bool = True,
    backend: str | Callable[..., Any] = "inductor",
    dynamic: bool | None = False,
    memory: Level = "none",
) -> None:
    """Compile each decoder layer and the last norm of a patched model, and the blocks of its vision tower, in place.

    Layers of one kind share a graph, so this takes seconds where compiling the model as a whole takes minutes. Run a
    packed batch before: it asks the attention implementations, which may not be asked inside a compiled layer.

    Args:
        model: a transformers causal language model, or anything that wraps one.
        recompute: do not keep between the passes what a layer's backward can make again from what it reads anyway: a
            normalised input, the product inside a gated MLP. Saves memory for about one percent of the time.
        backend: of ``torch.compile``.
        dynamic: of ``torch.compile``. False compiles a graph for each number of tokens; None one for all of them,
            around what exchanges between ranks at the second or third number that it sees.
        memory: what those layers keep that :func:`torch_backend.steps.memory.set_level` lets recompute.

    Raises:
        LayoutError: the model is not patched, or has not seen a packed batch.
        UnsupportedModelError: it has recurrent layers alone, which need the lengths of documents on the host.
    """
    root = causal_lm(model)
    state = state_of(root)
    if state is None or not state.choices:
        raise LayoutError("compile_layers takes a patched model that has run a packed batch: call patch(model) and it")
    if not state.requests and state.layers_need_lengths:
        raise UnsupportedModelError(
            f"the layers of {type(root).__name__} read the lengths of documents on the host, which a compiled layer "
            "would take from its first batch: run them as they are"
        )
    state.compiled = {replace(request, requires_grad=True) for request in state.requests}
    chosen = _recompute_cheap if recompute and backend == "inductor" else backend
    by_level = marked(_inductor if chosen == "inductor" else chosen, memory)
    for module in layers_of(state.decoder):
        recomputed = getattr(module, "gradient_checkpointing", False) and memory != "none"
        module.compile(backend=with_joined_adapters(by_level if recomputed else chosen), dynamic=dynamic)
        if dynamic is None:
            compiled: Any = module._compiled_call_impl
            module._compiled_call_impl = partial(_of_any_length, compiled)
    compile_towers(root, state.tower_requests, backend=chosen)


def _of_any_length(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a compiled layer whose first graph runs rows of all lengths.

    By itself torch.compile makes a graph for the first number of tokens that it sees, and a second one for all others.
    """
    arguments = (*args, *kwargs.values())
    forward = forward_among(arguments)
    if forward is not None and forward.context is not None:
        return call(*args, **kwargs)  # in several graphs, whose inputs nobody can mark
    for x in chain.from_iterable(x if isinstance(x, tuple) else (x,) for x in arguments):
        if isinstance(x, Tensor) and x.ndim > 1:
            torch._dynamo.maybe_mark_dynamic(x, 1)  # [1, T, ...]
    if forward is not None:
        forward.segments.mark_any_length()
    return call(*args, **kwargs)


def layers_of(decoder: nn.Module) -> list[nn.Module]:
    """Returns what is compiled of a decoder: its layers, and the last norm."""
    layers: list[nn.Module] = [module for module in decoder.modules() if isinstance(module, DecoderLayer)]
    norm = getattr(decoder, "norm", None)
    return layers if norm is None else [*layers, norm]


def _inductor(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    from torch._inductor.compile_fx import compile_fx

    with announced("compiling the forward of a kind of layer"):
        return compile_fx(graph, inputs, config_patches={"joint_custom_post_pass": SCALES_ONCE})


def _recompute_cheap(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    """Inductor, allowed to recompute in the backward what a matrix product reads there."""
    from torch._functorch import config

    with config.patch(ban_recompute_materialized_backward=False):
        return _inductor(graph, inputs)


class CapturedStep:
    """Calls ``step(batch)``, from some call on by replaying one CUDA graph.

    Args:
        step: takes a mapping of CUDA tensors and plain values; returns a tensor or a tuple of tensors. It must not
            read from the device and must reach everything that changes between calls through the batch.
        warm_up: calls that run as usual before the recording.
        enabled: False runs every call as usual, for comparison and off the GPU.
    """

    def __init__(self, step: Callable[[Mapping[str, Any]], Any], *, warm_up: int = 3, enabled: bool = True) -> None:
        self.step = step
        self.warm_up = warm_up
        self.enabled = enabled
        self.calls = 0
        self.batch: dict[str, Any] = {}
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream: torch.cuda.Stream | None = None
        self.pool: Any = None  # of another graph, to share its memory
        self.result: Any = None
        self.recording = False  # also after a recording that failed

    def __call__(self, batch: Mapping[str, Any]) -> Any:
        """One step on ``batch``, whose tensors may be on the host.

        Raises:
            LayoutError: the batch differs in more than its tensors' values from the first one.
        """
        self.calls += 1
        if not self.enabled:
            return self.step(batch)
        self._take(batch)
        if self.calls <= self.warm_up:
            return self._aside()
        if self.graph is None:
            self._record()
        assert self.graph is not None
        self.graph.replay()
        if isinstance(self.result, Tensor):
            return self.result.clone()
        return tuple(x.clone() for x in self.result)

    def uncaptured(self, batch: Mapping[str, Any]) -> Any:
        """One step on ``batch`` without a graph, even if one was recorded; it counts for the warm-up."""
        self.calls += 1
        self._take(batch)
        return self._aside()

    def _take(self, batch: Mapping[str, Any]) -> None:
        """Copy the batch into the memory that the graph reads."""
        given = {name: value for name, value in batch.items() if name not in BatchKey.ON_HOST}
        if not self.batch:
            self.batch = {
                name: value.to(DEVICE, copy=True) if isinstance(value, Tensor) else value
                for name, value in given.items()
            }
            return
        if (now := form_of(given)) != (first := form_of(self.batch)):
            changed = sorted({name for name, _ in now.items() ^ first.items()})
            raise LayoutError(
                f"a captured step takes batches of one form, and {', '.join(changed)} changed: "
                "give PackedCollator a capacity, max_seqlen and bucket"
            )
        for name, value in given.items():
            if isinstance(value, Tensor):
                self.batch[name].copy_(value, non_blocking=True)

    def _aside(self) -> Any:
        """One step as usual, on the stream of the recording, as graphs ask of what runs before them."""
        self.stream = self.stream or torch.cuda.Stream()  # one for all calls: memory is kept per stream
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = self.step(self.batch)
        torch.cuda.current_stream().wait_stream(self.stream)
        return result

    def _record(self) -> None:
        self.recording = True
        self.graph, self.result = record(lambda: self.step(self.batch), pool=self.pool, stream=self.stream)
        self.recording = False


def record(call: Callable[[], Any], *, pool: Any, stream: torch.cuda.Stream | None) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Record what ``call`` queues, which runs none of it.

    Args:
        pool: memory that other graphs use too; None for its own.
        stream: on which what was like it ran before.

    Returns:
        The graph, and what ``call`` returned.
    """
    graph = torch.cuda.CUDAGraph()
    # Only this thread's calls matter: a data loader's may pin memory meanwhile.
    recording = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
    failed: Exception | None = None
    result: Any = None
    try:
        with _random_numbers_kept(), recording:
            try:
                result = call()
            except Exception as error:
                failed = error
                raise
    except Exception:
        if failed is None:
            raise
    if failed is not None:  # the end of its recording raised another error, which says nothing
        try:
            raise failed
        finally:
            del failed  # without a cycle of error and frame, what was recorded is freed when the error is
    return graph, result


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """A recording that fails leaves the generator inside of it, and every later random number raises: renew it then."""
    if not torch.cuda.is_available():
        yield
        return
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    state = generator.get_state()
    try:
        yield
    except BaseException:
        fresh = torch.Generator(generator.device)
        fresh.set_state(state)
        generator.graphsafe_set_state(fresh)
        raise


class CapturedBackward:
    """Calls ``backward(batch)``, which adds to the gradients of ``parameters``, by replaying CUDA graphs.

    One graph writes the gradients and another one, in the same memory, adds to them. So a step may have any number of
    microbatches, and optimizer, clipping and schedule run as usual after it: the host queues them while the GPU works.

    Args:
        backward: takes a mapping of CUDA tensors and plain values, calls backward, returns the loss without a graph.
        parameters: all whose gradients it changes. Set them to None between the steps (``optimizer.zero_grad()``).
    """

    def __init__(self, backward: Callable[[Mapping[str, Any]], Tensor], parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.write = CapturedStep(backward, warm_up=2)
        self.add = CapturedStep(backward, warm_up=0)
        self.gradients: list[Tensor | None] = []

    def __call__(self, batch: Mapping[str, Any]) -> Tensor:
        """The loss of the batch, whose gradients are added.

        Raises:
            LayoutError: the batch differs in more than its tensors' values from the first one.
        """
        found = [parameter.grad for parameter in self.parameters]
        if all(gradient is None for gradient in found):
            loss: Tensor = self.write(batch)
            if self.write.graph is not None:
                self.gradients = self.gradients or [parameter.grad for parameter in self.parameters]
                for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
                    parameter.grad = gradient
            return loss
        if not self.gradients or any(x is not y for x, y in zip(found, self.gradients, strict=True)):
            return self.write.uncaptured(batch)  # somebody else's gradients, which no graph knows
        assert self.write.graph is not None
        self.add.stream, self.add.pool = self.write.stream, self.write.graph.pool()
        found_loss: Tensor = self.add(batch)
        return found_loss

    @property
    def recording(self) -> bool:
        """Returns whether a graph is being recorded, or its recording failed."""
        return self.write.recording or self.add.recording


def form_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the constant parts of a batch: shapes and dtypes of tensors, and everything else as it is."""
    given = {name: value for name, value in batch.items() if name not in BatchKey.ON_HOST}
    return {name: (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for name, x in given.items()}
