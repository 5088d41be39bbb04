"""Refusals of what cannot be cut over ranks, by all of them alike, so that none waits for another."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from tempfile import gettempdir
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertModel, LlamaForSequenceClassification, Trainer, TrainingArguments

from tests.torch_backend.context_parallel.test_context_parallel import LENGTHS, LONGROPE, all_ranks
from tests.torch_backend.models import collate, documents, tiny
from tests.torch_backend.ranks import refused
from tests.torch_backend.wrappers import sharded_by_fsdp_1
from torch_backend import PackedCollator, enable_packing, make_train_step, patch, unpad
from torch_backend.hf.patch import state_of
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.trainers.changes import Changes
from torch_backend.trainers.over_ranks import OverRanks

pytestmark = pytest.mark.slow  # starts processes

OTHER_ROUTER = "deepseek_v3"  # takes the option, and its model adds no loss
TEXT = ("input_ids", "labels")
OF_FOUR = ("mesh that does not divide", "gradients of some ranks", "fewer tokens than ranks", "heads")


def refuse(name: str) -> None:
    """Makes a call that must raise on all ranks alike."""
    mesh, world = all_ranks(), init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "cp"))
    batch = collate(documents(LENGTHS), capacity=None)
    one_beyond = batch["input_ids"].clone()
    one_beyond[0, 20] = 96  # on one rank alone
    on_mesh, one_group = partial(patch, verify=False, mesh=mesh), world["cp"].get_group()

    def different_batches() -> None:
        on_mesh(tiny("qwen3"))(**collate(documents(LENGTHS, seed=dist.get_rank()), capacity=None))

    def images() -> None:
        on_mesh(tiny("qwen3"))(**{**batch, "inputs_embeds": torch.zeros(1, 238, 64), "input_ids": None})

    def trainer() -> None:
        model = on_mesh(tiny("qwen3"))
        arguments = TrainingArguments(output_dir=gettempdir(), report_to=[], use_cpu=True)
        enable_packing(Trainer(model, arguments, train_dataset=[{"input_ids": [1, 2]}]), capacity=64)

    def shared(run: Callable[[Any, Any], Any]) -> None:
        model = on_mesh(tiny("qwen3"))
        prompt, *ends = documents((40, 9, 12))
        rows = [{"input_ids": torch.cat([prompt, end]), "labels": torch.cat([prompt * 0 - 100, end])} for end in ends]
        run(model, PackedCollator(model, share_prefix=True)(rows))

    def loss_weights_of_a_trainer() -> None:
        model = on_mesh(tiny("qwen3"))
        state = state_of(model)
        assert state is not None and state.context is not None
        OverRanks(Changes(Mock(label_smoother=None)), state.context).cut(
            {**batch, "loss_weights": batch["labels"]}, model
        )

    def step_of(process_group: Any = None, group: Any = None) -> Any:
        """A step whose gradients are reduced, and whose targets are counted, over these groups; None for all ranks."""
        return step_by(partial(DistributedDataParallel, process_group=process_group), group)

    def step_by(wrap: Callable[[Any], Any], group: Any = None) -> Any:
        model = wrap(on_mesh(tiny("qwen3")))
        return make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), group=group)

    def other_labels() -> None:
        labels = batch["labels"] + dist.get_rank() * (batch["labels"] == batch["labels"].max())
        on_mesh(tiny("qwen3"))(**{**batch, "labels": labels})

    def outside(ranks: list[int]) -> None:
        patch(tiny("qwen3"), verify=False, mesh=DeviceMesh("cpu", ranks))

    calls: dict[str, Callable[[], Any]] = {
        "mesh that does not divide": partial(outside, [0, 1, 2]),
        "shared prefixes": partial(shared, lambda model, batch: model(**batch)),
        "shared prefixes in a loss": partial(shared, causal_lm_loss),
        "ALiBi of a modeling file": lambda: on_mesh(tiny("bloom")),
        "decoder of whole documents": lambda: on_mesh(tiny("falcon_alibi")),
        "classifier": lambda: on_mesh(LlamaForSequenceClassification(tiny("llama").config)),
        "encoder": lambda: on_mesh(BertModel(BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1))),
        "unpadding": lambda: unpad(on_mesh(tiny("qwen3")), verify=False)(input_ids=torch.ones(2, 8, dtype=torch.long)),
        "weights in a trainer": loss_weights_of_a_trainer,
        "dropout": lambda: on_mesh(tiny("qwen3", attention_dropout=0.1))(**batch),
        "different batches": different_batches,
        "different labels": other_labels,
        "gradients of some ranks": lambda: step_of(one_group),
        "gradients of some ranks, FSDP1": lambda: step_by(partial(sharded_by_fsdp_1, process_group=one_group)),
        "targets of some ranks": lambda: step_of(None, one_group),
        "no boundaries": lambda: step_of()({name: batch[name] for name in TEXT}),
        "no boundaries in evaluation": lambda: step_of().evaluate([{name: batch[name] for name in TEXT}]),
        "fewer tokens than ranks": lambda: on_mesh(tiny("qwen3"))(**collate([torch.tensor([7])], capacity=None)),
        "token of another vocabulary": lambda: on_mesh(tiny("qwen3"))(**batch | {"input_ids": one_beyond}),
        "weights of a call": lambda: on_mesh(tiny("mamba2"))(**batch, loss_weights=torch.ones(1, sum(LENGTHS))),
        "positions": lambda: on_mesh(tiny("phi3", **LONGROPE))(**batch | {"position_ids": batch["position_ids"] + 1}),
        "embeddings": images,
        "trainer": trainer,
        "router": lambda: on_mesh(tiny(OTHER_ROUTER, output_router_logits=True)),
        "router of a call": lambda: on_mesh(tiny(OTHER_ROUTER))(**batch, output_router_logits=True),
        "chunks": lambda: on_mesh(tiny("llama4_text")),
        "heads": lambda: on_mesh(tiny("qwen3", num_key_value_heads=1), context_method="heads")(**batch),
        "method": lambda: on_mesh(tiny("qwen3"), context_method="ring"),
        "mesh of two dimensions": lambda: patch(tiny("qwen3"), verify=False, mesh=world),
        "no mesh": lambda: patch(tiny("qwen3"), verify=False, mesh=dist.group.WORLD),
    }
    calls[name]()


REFUSALS = {
    "shared prefixes": r"UnsupportedModelError: Qwen3ForCausalLM cannot run shared prefixes: the documents of its",
    "shared prefixes in a loss": r"UnsupportedModelError: Qwen3ForCausalLM cannot run shared prefixes: the documents o",
    "ALiBi of a modeling file": r"UnsupportedModelError: BloomForCausalLM .* its attention adds ALiBi",
    "decoder of whole documents": r"UnsupportedModelError: FalconForCausalLM .* its decoder runs as a whole on batches",
    "classifier": r"UnsupportedModelError: LlamaForSequenceClassification .* only the next-token loss of a causal lang",
    "encoder": r"UnsupportedModelError: BertModel .* only the next-token loss of a causal language model",
    "unpadding": r"UnsupportedModelError: unpad\(model\) does not compute over ranks that hold parts of documents",
    "weights in a trainer": r"UnsupportedError: a Trainer divides its loss by the number of targets, and rows with we",
    "mesh that does not divide": r"UnsupportedError: a mesh of 3 ranks does not divide the 4 ranks of the job",
    "dropout": r"UnsupportedModelError: Qwen3Attention \(layer 0\) drops attention weights with probability 0.1",
    "different batches": r"LayoutError: the ranks of a context-parallel group have different batches",
    "different labels": r"LayoutError: the ranks of a context-parallel group have different batches",
    "gradients of some ranks": r"UnsupportedError: DistributedDataParallel reduces gradients over ranks [0-3, ]+ and d",
    "gradients of some ranks, FSDP1": r"UnsupportedError: FullyShardedDataParallel reduces gradients over ranks \d",
    "targets of some ranks": r"UnsupportedError: targets would be counted on ranks [0-3, ]+ and documents are cut over",
    "no boundaries": r"UnsupportedError: the batch does not say where its documents begin, so it is not cut over ranks",
    "no boundaries in evaluation": r"UnsupportedError: the batch does not say where its documents begin, so it is not",
    "fewer tokens than ranks": r"PackingError: 1 tokens are fewer than \d ranks, so a rank would have none",
    "token of another vocabulary": r"LayoutError: input_ids holds 96 at row 0, token 20, and Qwen3ForCausalLM has embe",
    "weights of a call": r"UnsupportedModelError: a packed batch came with loss_weights .* which the loss of Mamba2For",
    "positions": r"LayoutError: position_ids are not those of a document of its own at .* leave position_ids out",
    "embeddings": r"UnsupportedError: a batch with inputs_embeds cannot be cut over ranks",
    "trainer": r"UnsupportedModelError: enable_packing\(trainer\) without ParallelismConfig\(cp_size=...\) does not co",
    "router": r"UnsupportedModelError: DeepseekV3ForCausalLM cannot be trained under .* the loss of its router is n",
    "router of a call": r"UnsupportedModelError: DeepseekV3ForCausalLM does not compute the loss of its router",
    "chunks": r"UnsupportedModelError: Llama4ForCausalLM cannot be trained under context parallelism, because its a",
    "heads": r'UnsupportedError: context_method="heads" needs heads that divide by the \d ranks',
    "method": r"PackingError: context_method is 'ring': pass auto, keys or heads",
    "mesh of two dimensions": r'PackingError: the mesh has 2 dimensions \(dp, cp\): .* as in mesh\["cp"\]',
    "no mesh": r"PackingError: mesh is a \w+: pass one dimension of a DeviceMesh",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_cut_is_refused(name: str) -> None:
    """On four ranks what depends on their number."""
    for error in refused(refuse, name, ranks=4 if name in OF_FOUR else 2):
        assert re.match(REFUSALS[name], error)
