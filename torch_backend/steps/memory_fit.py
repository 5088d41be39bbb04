"""Levels of memory and the device: which rows fit at which level, before the first step and when one was too long.

A model, its optimizer and the tokens of a microbatch -> :class:`packing_core.training.memory_model.MemoryModel`, with
the weights and states counted -> compared with what the device has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from packing_core.errors import CapacityError, PackingError, UnsupportedModelError
from packing_core.training.memory_model import GIB, LEVELS, USABLE, MemoryModel
from torch_backend.hf.anatomy.layers import uses_interface
from torch_backend.hf.anatomy.structure import causal_lm, execution_device
from torch_backend.hf.attention import DecoderLayer
from torch_backend.hf.override import original_class
from torch_backend.hf.patch import context_of
from torch_backend.hf.quantised import bytes_beside_weights
from torch_backend.ops.mxfp4 import Mxfp4Weight, shared_bytes
from torch_backend.steps.boundaries import why_not_shared
from torch_backend.steps.compiling import announce
from torch_backend.steps.eligibility import why_not_compiled
from torch_backend.steps.memory import Level, draws_random_numbers, level_of, set_level
from torch_backend.steps.tiled_layers import tiled_parts

_ONE_STATE = ("lion", "rmsprop", "adagrad")  # in names of optimizers that keep one number for each trained one
_UNSURE = 1.05  # what the formula may be wrong by


@dataclass(frozen=True)
class StepMemory:
    """The memory of a model's training step, beside what its device and the host have.

    Attributes:
        model: a transformers model, or a wrapper of one.
        optimizer: whose states are counted if there are any, else expected by its kind; AdamW if None.
        autocast: the dtype of activations, where it is not that of the weights.
        accumulates: whether a step has several microbatches.
    """

    model: nn.Module
    optimizer: Any = None
    autocast: torch.dtype | None = None
    accumulates: bool = False

    def formula(self) -> MemoryModel:
        """Returns the bytes of a step by level and tokens.

        Raises:
            UnsupportedModelError: no formula is known for its layers, or documents are cut over ranks.
        """
        model, root = self.model, causal_lm(self.model)
        if context_of(root) is not None:
            raise UnsupportedModelError("what layers keep around their exchanges between ranks is not known beforehand")
        parameters = list(model.parameters())
        trained = [p for p in parameters if p.requires_grad]
        dtype = self.autocast or root.dtype
        weights = sum(map(_bytes, (*parameters, *model.buffers()))) + sum(bytes_beside_weights(root, dtype))
        dense = (p for p in parameters if p.is_floating_point() and not isinstance(p, Mxfp4Weight))
        cast = [p for p in dense if p.dtype != dtype] if self.autocast else []
        copies = sum(map(_numel, cast)) * dtype.itemsize
        layers = max(1, int(getattr(root.config.get_text_config(), "num_hidden_layers", 1)))
        gradients = sum(map(_bytes, trained))
        output = root.get_output_embeddings()
        memory = MemoryModel.from_config(
            root.config.get_text_config(),
            fixed=weights + copies + gradients + _states(self.optimizer, trained),
            gradients=gradients,
            itemsize=dtype.itemsize,
            adapted=_ranks(root) // layers,
            adapts_mlp=_adapts_mlp(root),
            head=output is not None and any(p.requires_grad for p in output.parameters()),
            tiles=tiled_parts(root),
        )
        # buckets of DDP are there from the beginning too
        return replace(memory, accumulates=self.accumulates or isinstance(model, nn.parallel.DistributedDataParallel))

    def choose(self, tokens: int) -> tuple[Level, str]:
        """Returns the fastest level at which a microbatch of ``tokens`` fits the device, and a reason.

        Raises:
            CapacityError: it fits at none.
            UnsupportedModelError: as :meth:`formula`.
        """
        if (there := self.device) is None:
            device = execution_device(causal_lm(self.model))
            return "none", f"the memory of {device.type} is not asked for"
        if (reason := why_not_compiled(self.model)) is not None:
            return "full", f"layers are not compiled ({reason}), so what they keep is not known beforehand"
        memory, host = self.formula(), self.host
        there -= self._others()
        found: Any = memory.fastest(tokens, there, host)
        if found is None:
            raise _too_long(memory, tokens, there, host)
        group = (memory.group(tokens, host) or 1) if found == "offload" else 1
        need = memory.bytes(found, tokens, group=group) / GIB
        shared = f", {group} layers share an input on the host" if group > 1 else ""
        return found, f"{tokens:,} tokens need {need:.1f} of {there / GIB:.1f} GiB{shared}"

    def check(self, tokens: int) -> None:
        """Announce a microbatch that probably does not fit at the model's level, where the formula knows it.

        Raises:
            CapacityError: it fits at no level, by more than the formula may be wrong.
        """
        if (memory := self._compiled()) is None or (there := self.device) is None:
            return
        there, host, level = there - self._others(), self.host, self._level()
        need = _need(memory, level, tokens, host)
        if need <= USABLE * there:
            return
        if memory.fastest(tokens, int(_UNSURE * there / USABLE), host) is None:
            raise _too_long(memory, tokens, there, host)
        found = memory.fastest(tokens, there, host)
        way = f'memory="{found}" fits' if found is not None else "no level surely fits"
        announce(
            f'a row of {tokens:,} tokens needs about {need / GIB:.1f} GiB at memory="{level}", and {there / GIB:.1f} '
            f"are there: {way}"
        )

    def fits_whole(self, tokens: int) -> bool:
        """Returns whether a row surely fits at the level of the model without tiles, as one of several microbatches.

        It does not where that is not known: off CUDA, where layers are not compiled, and in families without a formula.
        """
        memory = replace(self, accumulates=True)._compiled()
        if memory is None or (there := self.device) is None:
            return False
        need = _need(memory, self._level(), tokens, self.host, tiles=False)
        return _UNSURE * need <= USABLE * (there - self._others())

    def describe(self) -> str | None:
        """Describes the longest row that fits at each level; None where that is not known."""
        if (memory := self._known()) is None or (there := self.device) is None:
            return None
        host = self.host
        longest = (f'"{level}" {memory.longest(level, there, host):,}' for level in LEVELS)
        return f"the longest row or document that fits {there / GIB:.1f} GiB compiled, in tokens: {', '.join(longest)}"

    @contextmanager
    def naming_the_level(self, batch: Mapping[str, Any]) -> Iterator[None]:
        """Inside, an out-of-memory error also says at which level the microbatch would fit."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            if (memory := self._known()) is None or (there := self.device) is None:
                raise
            error.args = (f"{error} {self._way_out(tokens_of(batch), memory, there)}",)
            raise

    @property
    def device(self) -> int | None:
        """Returns the bytes that the device has for this process; None off CUDA."""
        return device_bytes(execution_device(causal_lm(self.model)))

    @property
    def host(self) -> int | None:
        """As :func:`host_bytes`; none where the layers of the model cannot keep their inputs there."""
        return 0 if draws_random_numbers(self.model) else host_bytes()

    def _known(self) -> MemoryModel | None:
        """Returns the formula, where there is one."""
        try:
            return None if self.device is None else self.formula()
        except PackingError:
            return None

    def _compiled(self) -> MemoryModel | None:
        """Returns the formula where it holds, which is that of compiled layers."""
        return None if self.device is None or why_not_compiled(self.model) is not None else self._known()

    def _level(self) -> Level:
        """Returns the level of the model, ``"full"`` in place of ``"offload"`` where inputs stay on the device."""
        level = level_of(self.model)
        return "full" if level == "offload" and draws_random_numbers(self.model) else level

    def _others(self) -> int:
        """Returns the bytes that are allocated on the device for something else than this training step."""
        device = execution_device(causal_lm(self.model))
        if device.type != "cuda":
            return 0
        ours = sum(_bytes(p) + (0 if p.grad is None else _bytes(p.grad)) for p in self.model.parameters())
        ours += bytes_beside_weights(causal_lm(self.model), torch.uint8)[0] + shared_bytes(device)
        return max(0, torch.cuda.memory_allocated(device) - ours - _counted(self.optimizer))

    def _way_out(self, tokens: int, memory: MemoryModel, there: int) -> str:
        now, host = level_of(self.model), self.host
        slower = LEVELS[LEVELS.index(now) + 1 :]
        longest = {level: memory.longest(level, there, host) for level in LEVELS}
        row = f'Crosspack: a row of {tokens:,} tokens ran at memory="{now}"'
        if (reason := why_not_compiled(self.model)) is not None:  # the formula is that of compiled layers
            way = 'memory="full" needs less' if "full" in slower else "a shorter one needs less"
            return f"{row}, and layers are not compiled ({reason}): {way}"
        if (fits := next((level for level in slower if longest[level] >= tokens), None)) is not None:
            return f'{row}, and fits at memory="{fits}"'
        most, level = max((most, level) for level, most in longest.items())
        return f'{row}; the longest that fits has {most:,} tokens, at memory="{level}"'


def _need(memory: MemoryModel, level: Level, tokens: int, host: int | None, *, tiles: bool = True) -> int:
    group = (memory.group(tokens, host) or 1) if level == "offload" else 1
    return memory.bytes(level, tokens, group=group, tiles=tiles)


def _too_long(memory: MemoryModel, tokens: int, there: int, host: int | None) -> CapacityError:
    longest = {level: memory.longest(level, there, host) for level in LEVELS}
    best = max(longest, key=lambda level: longest[level])
    row = f"a row of {tokens:,} tokens fits {there / GIB:.1f} GiB at no level of memory"
    if not longest[best]:
        return CapacityError(
            f"{row}, and no shorter one does: weights, gradients and optimizer take {memory.fixed / GIB:.1f} GiB. "
            "Train adapters, or shard the model over ranks"
        )
    return CapacityError(
        f'{row}: the longest that does has {longest[best]:,}, at memory="{best}". '
        "Pack or cut documents to that capacity"
    )


class FittedLevel:
    """The level of a model in one step, looked at again where a longer microbatch comes.

    Attributes:
        chooses: whether the level is chosen (``memory="auto"``), or only checked.
        level: that of the last microbatch, None before the first one.
        tokens: of the longest microbatch so far; accumulates: whether a step had several; reason: of the level.
    """

    def __init__(self, *, chooses: bool = True) -> None:
        self.chooses = chooses
        self.level: Level | None = None
        self.tokens = 0
        self.accumulates = False
        self.reason = ""

    def fit(self, step: StepMemory, tokens: int) -> bool:
        """Set the level for a microbatch, and return whether it is another one than before, whoever changed it."""
        longest, accumulates = max(tokens, self.tokens), step.accumulates or self.accumulates
        if (longest, accumulates) != (self.tokens, self.accumulates):
            step = replace(step, accumulates=accumulates)
            if self.chooses:
                level, self.reason = step.choose(longest)
                set_level(step.model, level)
                announce(f'memory="auto" takes "{level}": {self.reason}')
            else:
                step.check(longest)
            self.tokens, self.accumulates = longest, accumulates
        before, self.level = self.level, level_of(step.model)
        return before not in (None, self.level)


def group_on_host(model: nn.Module, tokens: int, held: int = 0) -> int:
    """Returns how many layers share one input on the host at ``"offload"``, for a microbatch of ``tokens``.

    Args:
        held: bytes of the host that are page-locked for such inputs already.

    Raises:
        PackingError: the host cannot hold one input, or too few for layers that cannot share.
    """
    there = host_bytes()
    try:
        memory = StepMemory(model).formula()
    except UnsupportedModelError:
        return 1
    group = memory.group(tokens, None if there is None else there + held)
    if group == 1 or (group is not None and (why := why_not_shared(model)) is None):
        return group
    least = memory.host if group is not None else memory.hidden
    alone = f", because {why}" if group is not None else ""
    raise PackingError(
        f'memory="offload" keeps {tokens * least / GIB:.1f} GiB of a row of {tokens:,} tokens on the host{alone}, and '
        f'{((there or 0) + held) / GIB:.1f} GiB are free there: pass memory="full", or shorter rows'
    )


def tokens_of(batch: Mapping[str, Any]) -> int:
    """Returns the tokens of a microbatch, padding included."""
    given = batch.get("input_ids")
    return int((batch["labels"] if given is None else given).numel())


def device_bytes(device: torch.device) -> int | None:
    """Returns what this process can allocate on a device in all; None off CUDA."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device) * total
    return min(free + torch.cuda.memory_reserved(device), int(allowed))


def host_bytes() -> int | None:
    """Returns what of the host's memory is free to be page-locked; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else int(USABLE * 1024 * int(found))


def _states(optimizer: Any, trained: list[nn.Parameter]) -> int:
    """Bytes of the optimizer's states, as they are or, before its first step, as its kind will have them."""
    if (counted := _counted(optimizer)) > 0:
        return counted
    inner = getattr(optimizer, "optimizer", optimizer)
    name = type(inner).__name__.lower()
    groups = getattr(optimizer, "param_groups", [{}])
    if getattr(inner, "is_paged", False):
        return 0  # on the host, where the device has no room
    if name == "adafactor":
        return sum(map(_of_rows_and_columns, trained))
    if "sgd" in name:
        states = int(any(group.get("momentum") for group in groups))
    else:
        states = 1 if any(word in name for word in _ONE_STATE) else 2
    if "8bit" in name or getattr(getattr(inner, "args", None), "optim_bits", None) == 8:
        return states * sum(map(_numel, trained))
    single = type(inner).__module__.startswith("bitsandbytes.")  # keeps float32 whatever the weights are
    return states * (4 * sum(map(_numel, trained)) if single else sum(map(_bytes, trained)))


def _of_rows_and_columns(x: Tensor) -> int:
    """Bytes of what Adafactor keeps: float32 of each row and column of a matrix, of each number of a vector."""
    *others, rows, columns = (1, 1, *_local(x).shape)
    return 4 * (prod(others) * (rows + columns) if x.ndim > 1 else columns)


def _counted(optimizer: Any) -> int:
    states = getattr(optimizer, "state", None) or {}
    tensors = [x for each in states.values() for x in each.values() if isinstance(x, Tensor)]
    return sum(_bytes(x) for x in tensors if x.numel() > 1 and not getattr(x, "is_paged", False))


def _ranks(root: nn.Module) -> int:
    """The ranks of all adapters in the layers of a model, added up."""
    found = 0
    inside: Iterator[Any] = (m for layer in root.modules() if isinstance(layer, DecoderLayer) for m in layer.modules())
    for module in inside:
        ranks = getattr(module, "r", None)
        if isinstance(ranks, dict) and hasattr(module, "lora_A"):
            found += sum(ranks[name] for name in module.lora_A)
    return found


def _adapts_mlp(root: nn.Module) -> bool:
    """Returns whether a layer has adapters outside of its attention."""
    for layer in root.modules():
        if isinstance(layer, DecoderLayer):
            attention = (m for m in layer.modules() if uses_interface(original_class(m)))
            inside = {part for each in attention for part in each.modules()}
            if any(getattr(m, "lora_A", None) for m in layer.modules() if m not in inside):
                return True
    return False


def _local(x: Tensor) -> Tensor:
    return getattr(x, "_local_tensor", x)


def _numel(x: Tensor) -> int:
    return _local(x).numel()


def _bytes(x: Tensor) -> int:
    """Returns the bytes of a tensor; of one that stands for others, theirs."""
    local = _local(x)
    if is_traceable_wrapper_subclass(local):
        return sum(_bytes(getattr(local, name)) for name in local.__tensor_flatten__()[0])
    return local.numel() * x.element_size()
