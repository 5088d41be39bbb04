"""Training state of a job: AdamW, float32 copies of bfloat16 weights, checkpoints.

Weights, optimizer states and random states leave and enter as safetensors only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from packing_core.errors import naming
from packing_core.extras import require
from packing_core.training.options import Options
from torch_backend.job.ranks import Ranks, like, whole, whole_weights

WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
_RANDOM = "random."  # prefix of the generators' states among the optimizer's tensors
_MASTER = "master"
Tensors = dict[str, Tensor]


class MasterWeights(torch.optim.AdamW):
    """AdamW over float32 copies of parameters of lower precision, which are rounded to these after every step."""

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        self.rounded = [parameter for group in groups for parameter in group["params"]]
        self.masters = [parameter.detach().float() for parameter in self.rounded]
        taken = iter(self.masters)
        super().__init__([{**group, "params": [next(taken) for _ in group["params"]]} for group in groups], **options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.rounded:
            parameter.grad = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        for parameter, master in zip(self.rounded, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        result = super().step(closure)
        for parameter, master in zip(self.rounded, self.masters, strict=True):
            parameter.copy_(master)
            master.grad = None
        return result

    def state_dict(self) -> dict[str, Any]:
        """The states, each with its float32 weight under ``master``."""
        saved = super().state_dict()
        states = saved["state"]
        return {**saved, "state": {n: {**states.get(n, {}), _MASTER: x} for n, x in enumerate(self.masters)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states = {number: dict(values) for number, values in state_dict["state"].items()}
        with torch.no_grad():
            for number, master in enumerate(self.masters):
                master.copy_(states[number].pop(_MASTER))
        super().load_state_dict({**state_dict, "state": {n: values for n, values in states.items() if values}})


def make_optimizer(
    model: nn.Module,
    options: Options,
    *,
    master_weights: bool = False,
    named: Callable[[], tuple[Any, dict[str, Any]]] | None = None,
) -> torch.optim.Optimizer:
    """Makes the optimizer of what is trained, at the rate 1, which a schedule multiplies.

    Weight decay acts on matrices alone.

    Args:
        named: returns the class of ``options.optim`` and its arguments; None makes fused AdamW.

    Raises:
        PackingError: the library of the optimizer is not installed, or it refuses an argument.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if named is None or master_weights:
        adamw = MasterWeights if master_weights else torch.optim.AdamW
        return adamw(groups, lr=1.0, fused=True)
    with naming(f"--optim {options.optim or 'adamw_torch_fused'}", (ImportError, TypeError, ValueError)):
        kind, arguments = named()
        optimizer: torch.optim.Optimizer = kind(groups, **arguments)
    return optimizer


def gathered(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> tuple[Tensors, Tensors]:
    """Gathers the contents of a checkpoint: the trained weights, and the states of optimizer and random generators.

    Every rank must call it; sharded tensors are gathered.
    """
    tensors = {
        f"{number}.{key}": whole(value) if isinstance(value, Tensor) else torch.tensor(value)
        for number, values in optimizer.state_dict()["state"].items()
        for key, value in values.items()
        if value is not None
    }
    for rank, states in enumerate(ranks.everyones(_random_states())):
        tensors |= {f"{_RANDOM}{rank}.{kind}": state for kind, state in states.items()}
    return whole_weights(changing(model)), tensors


def save(folder: Path, weights: Tensors, states: Tensors) -> None:
    """Write what :func:`gathered` returned to ``folder``, as safetensors."""
    safetensors = require("safetensors.torch", extra="hf")
    for name, tensors in ((WEIGHTS, weights), (OPTIMIZER, states)):
        safetensors.save_file({key: x.contiguous() for key, x in tensors.items()}, str(folder / name))


def changing(model: nn.Module) -> Tensors:
    """The tensors of a model that training may change, tied ones once: not the weights under adapters."""
    persistent = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {name: p for name, p in model.named_parameters() if p.requires_grad} | buffers


def load_weights(folder: Path, model: nn.Module) -> None:
    """Read the weights of a checkpoint, before the model is sharded."""
    safetensors = require("safetensors.torch", extra="hf")
    model.load_state_dict(safetensors.load_file(str(folder / WEIGHTS)), strict=False)  # the rest does not change


def load_states(folder: Path, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Read the optimizer's states and this rank's random generators.

    A rank that the checkpoint does not know keeps its generators: the run goes on with more ranks than it had.
    """
    safetensors = require("safetensors.torch", extra="hf")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, Tensors] = {}
    for name, value in safetensors.load_file(str(folder / OPTIMIZER)).items():
        number, _, key = name.removeprefix(_RANDOM).partition(".")
        if not name.startswith(_RANDOM):
            state.setdefault(int(number), {})[key] = like(value, parameters[int(number)])
        elif int(number) == ranks.rank:
            (torch.cuda if key == "cuda" else torch).set_rng_state(value)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _random_states() -> Tensors:
    on_gpu = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"cpu": torch.get_rng_state(), **on_gpu}
