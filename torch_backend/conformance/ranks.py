"""The adapter on several ranks: processes that compute together over gloo, and documents that are cut over them."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import start_processes

from packing_core import protocol
from packing_core.protocol import Document, Gradients
from torch_backend.collate import PackedCollator
from torch_backend.conformance.tensors import TensorMethods, to_numpy
from torch_backend.hf.patch import cut_over_ranks
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.patching import patch


def on_ranks(device: torch.device, work: Callable[..., Any], each: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Returns what ``work`` returns on every rank, in a process of its own, for the arguments of that rank."""
    with tempfile.TemporaryDirectory() as folder:
        # A server that has imported the adapter once forks the ranks: importing it in each costs seconds. But a
        # process that was forked after that cannot use CUDA.
        multiprocessing.set_forkserver_preload(["torch_backend.conformance"])
        how = "spawn" if device.type == "cuda" else "forkserver"
        start_processes(_run, (work, each, folder), nprocs=len(each), start_method=how)
        return [torch.load(Path(folder) / f"found{rank}", weights_only=False) for rank in range(len(each))]


def _run(rank: int, work: Callable[..., Any], each: Sequence[tuple[Any, ...]], folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", len(each))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(each))
    torch.save(work(*each[rank]), Path(folder) / f"found{rank}")
    dist.barrier()  # none ends while another still sends
    dist.destroy_process_group()


class ContextMethods(TensorMethods):
    """`context_gradients`, on ranks of the CPU."""

    name: str

    def _model(self, decoder: protocol.Decoder, dtype: str) -> nn.Module:
        """A patched model of the suite's decoder."""
        raise NotImplementedError

    def context_gradients(
        self, decoder: protocol.Decoder, documents: Sequence[Document], *, ranks: int, dtype: str
    ) -> tuple[float, Gradients, list[int]]:
        protocol.require_declared(self, options={"cut_documents"})
        found = on_ranks(self.device, self._gradients_of_part, [(decoder, documents, dtype)] * ranks)
        loss, gradients, _ = found[0]
        return loss, gradients, [held for _, _, held in found]

    def _gradients_of_part(
        self, decoder: protocol.Decoder, documents: Sequence[Document], dtype: str
    ) -> tuple[float, Gradients, int]:
        """The loss and the gradients of all ranks, and the tokens of this one."""
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))["cp"]
        model = patch(self._model(decoder, dtype), implementation=self.name, verify=False, mesh=mesh)
        features = [{"input_ids": document.input_ids, "labels": document.labels} for document in documents]
        part = cut_over_ranks(model, PackedCollator(model)(features))
        loss, weight = causal_lm_loss(model, part)
        dist.all_reduce(weight)
        mean = loss / weight
        mean.backward()
        total = mean.detach().clone()
        for x in (total, *(p.grad for p in model.parameters() if p.grad is not None)):
            dist.all_reduce(x)
        gradients = {name: to_numpy(p.grad) for name, p in model.named_parameters()}
        return total.item(), gradients, part["input_ids"].numel()
