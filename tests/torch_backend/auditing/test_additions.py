"""Modules and hooks that somebody added to a model: no clone has them, so they are proved on the model itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_backend
from packing_core.errors import ContaminationError
from tests.torch_backend.hf.test_document_heads import classifier
from tests.torch_backend.models import alone, assert_same, documents, packed, tiny
from torch_backend.hf.anatomy.additions import additions, parts_of
from torch_backend.hf.patch import state_of


def before(x: Tensor) -> Tensor:
    """Each token's predecessor in the row."""
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


class Shifted(nn.Module):
    """Adds what the token before has, times a gate."""

    def __init__(self, inner: nn.Module, gate: float = 1.0) -> None:
        super().__init__()
        self.inner, self.gate = inner, nn.Parameter(torch.tensor(gate))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x + self.gate * before(x))


class Scaled(nn.Module):
    """Scales every token by itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x * self.scale)


class NumbersRow(nn.Embedding):
    """Embeds tokens by their place in the row, too."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + torch.arange(ids.shape[1])[None, :, None] / 10


def projection(model: Any) -> None:
    model.model.layers[0].self_attn.o_proj = Shifted(model.model.layers[0].self_attn.o_proj)


def closed_gate(model: Any) -> None:
    model.model.layers[0].mlp = Shifted(model.model.layers[0].mlp, gate=0.0)


def norm(model: Any) -> None:
    model.model.norm = Shifted(model.model.norm)


def torch_layer(model: Any) -> None:
    width = model.config.hidden_size
    inside = nn.TransformerEncoderLayer(width, 2, width, batch_first=True)
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, inside)


def hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda _, args, output: output - output.mean(1, keepdim=True))


@pytest.mark.parametrize(
    ("add", "named"),
    [
        (projection, r"layers\.0\.self_attn\.o_proj \(Shifted\)"),
        (closed_gate, r"layers\.0\.mlp \(Shifted\)"),
        (norm, r"model\.norm \(Shifted\)"),
        (torch_layer, r"layers\.0\.mlp\.1 \(TransformerEncoderLayer\)"),
        (hook, r"a hook on model\.layers\.0"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_reads_other_tokens_is_refused_by_name(add: Callable[[Any], None], named: str) -> None:
    model = tiny("llama")
    add(model)
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(ContaminationError, match=f"^packed documents see each other in LlamaForCausalLM: .*{named}"):
        torch_backend.patch(model)
    assert state_of(model) is None
    assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())


def test_documents_of_one_token_are_among_those_that_are_proved() -> None:
    model = classifier("llama")
    norm(model)  # a document's last token, which the head reads, sees other documents only if it is the first one too
    with pytest.raises(ContaminationError, match="see each other"):
        torch_backend.patch(model)


def test_what_numbers_the_row_is_refused_by_name() -> None:
    model = tiny("llama")
    embedding = model.get_input_embeddings()
    model.set_input_embeddings(NumbersRow(*embedding.weight.shape, _weight=embedding.weight.detach()))
    with pytest.raises(ContaminationError, match=r"not what they are alone .*embed_tokens \(NumbersRow\)"):
        torch_backend.patch(model)


def test_what_reads_each_token_alone_is_exact_and_left_as_it_was() -> None:
    model = tiny("llama").train()
    model.model.layers[0].mlp = Scaled(model.model.layers[0].mlp).eval()
    model.model.layers[1].register_forward_hook(lambda *_: None)
    truth = alone(model, documents())
    torch_backend.patch(model)
    assert model.training and not model.model.layers[0].mlp.training
    assert_same(packed(model, documents()), truth, 2e-5)


@pytest.mark.parametrize("patched", [False, True])
def test_an_audit_says_what_additions_do(patched: bool) -> None:
    model = tiny("llama")
    norm(model)
    report = torch_backend.audit(model, patched=patched)
    assert (report.verdict, report.additions) == ("contaminated", ("model.norm (Shifted)",))
    assert state_of(model) is None
    model.model.norm = Scaled(model.model.norm.inner)
    assert torch_backend.audit(model, patched=True).verdict == "exact"


def lora(*targets: str) -> Any:
    return get_peft_model(tiny("qwen3"), LoraConfig(r=2, target_modules=list(targets))).base_model.model


def test_what_shards_a_module_adds_nothing() -> None:
    """FSDP2 makes a class of its own for each module that it shards; that of PEFT's layers is of no package."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        model, own = lora("lm_head"), parts_of(lora("lm_head"))
        fully_shard(model.lm_head, mesh=init_device_mesh("cpu", (2,)))
        assert isinstance(model.lm_head, FSDPModule)
        assert not additions(model, own)
    finally:
        dist.destroy_process_group()


def test_a_parametrization_hides_no_module() -> None:
    """Torch makes a class of its own for each module that it parametrizes, too."""
    model, own = lora("q_proj"), parts_of(lora("q_proj"))
    projection = model.model.layers[0].self_attn.q_proj
    projection.gain = nn.Parameter(torch.ones(2))
    parametrize.register_parametrization(projection, "gain", nn.Identity())
    assert all("parametrizations" in name for name in additions(model, own))
    model.model.layers[0].mlp = Scaled(model.model.layers[0].mlp)
    parametrize.register_parametrization(model.model.layers[0].mlp, "scale", nn.Identity())
    assert "model.layers.0.mlp (Scaled)" in additions(model, own)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2", "mamba", "gemma3_text", "bloom", "gpt_oss", "jamba"])
def test_a_model_that_is_as_its_config_makes_it_has_no_additions(family: str) -> None:
    model = tiny(family)
    for each in (model, torch_backend.patch(model, verify=False)):
        assert not additions(each, parts_of(tiny(family)))
