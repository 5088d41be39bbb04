"""Refusals of what cannot be cut over ranks, by all of them alike, and the documents that are cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from tempfile import gettempdir
from typing import Any
from unittest.mock import Mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertModel, LlamaForSequenceClassification, Trainer, TrainingArguments

from tests.torch_backend.models import collate, documents, tiny
from tests.torch_backend.torchrun_loss import sharded_by_fsdp_1
from torch_backend import PackedCollator, enable_packing, make_train_step, patch, unpad
from torch_backend.hf.patch import state_of
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.trainers.over_ranks import OverRanks

# On two ranks the document of 190 has one cut, on four three.
LENGTHS = (5, 190, 33, 1, 7, 2)
# The document of 190 has the long frequencies, and no position of its second rank shows it.
LONGROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [4.0 + i for i in range(8)],
        "original_max_position_embeddings": 160,
        "factor": 4.0,
    },
    "original_max_position_embeddings": 160,
}
OTHER_ROUTER = "deepseek_v3"  # takes the option, and its model adds no loss
TEXT = ("input_ids", "labels")


def refusals(mesh: Any, world: Any) -> dict[str, Callable[[], Any]]:
    """Calls that must raise on all ranks alike, so that none of them waits."""
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
        OverRanks(Mock(label_smoother=None), state.context).cut({**batch, "loss_weights": batch["labels"]}, model)

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

    three = {"mesh that does not divide": partial(outside, [0, 1, 2])} if dist.get_world_size() == 4 else {}
    return three | {
        "shared prefixes": partial(shared, lambda model, batch: model(**batch)),
        "shared prefixes in a loss": partial(shared, causal_lm_loss),
        "ALiBi of a modeling file": lambda: on_mesh(tiny("bloom")),
        "decoder of whole documents": lambda: on_mesh(tiny("mpt")),
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
