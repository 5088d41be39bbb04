"""Every family of AutoModelForCausalLM: exact, or refused for a reason, and as docs/models.md says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

import torch_backend
from packing_core.errors import UnsupportedModelError
from packing_core.planning.cost import Cost
from tests.torch_backend.models import collate, documents, tiny
from tools.tables.expert_families import audit_family_experts
from tools.tables.families import audit_family
from torch_backend.auditing import model as audits
from torch_backend.auditing.probe import SHORT
from torch_backend.auditing.tiny import all_families, family_config, tiny_config, tiny_model
from torch_backend.hf.anatomy.families import refusal
from torch_backend.hf.patch import state_of

PAGE = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
DECODERS = PAGE.partition("<!-- decoders -->")[2].partition("<!-- end of decoders -->")[0]
ROUTES = re.findall(r"^\| (attention|documents) \| (.*) \|$", DECODERS, re.MULTILINE)
ON_PAGE = {family: route for route, families in ROUTES for family in families.split(", ")}
EXACT = {family: ON_PAGE[family] for family in ON_PAGE if family in all_families()}  # older transformers have fewer
NOT_BUILT = re.findall(r"^\| (\S+) \|", DECODERS.partition("| not built tiny")[2], re.MULTILINE)


# One of each kind of layer and route runs the rows of docs/models.md, in which documents begin where chunks of kernels
# do and are longer than several; the others run those by which `patch` proves a model.
IN_LONG_ROWS = {"bamba", "bloom", "deepseek_v3", "gemma2", "gpt_neo", "gpt_oss", "inkling_text", "lfm2", "llama"}
IN_LONG_ROWS |= {"qwen3_next", "recurrent_gemma"}


@pytest.mark.parametrize("family", all_families())
def test_no_family_is_silently_wrong(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if family not in IN_LONG_ROWS:
        monkeypatch.setattr(audits, "LONG", SHORT)
    found = audit_family(family)
    assert found.verdict != "contaminated", str(found.report)
    if family in EXACT:
        assert found.report is not None
        assert found.verdict == "exact" and found.report.route == EXACT[family], found
    elif family in NOT_BUILT:
        assert found.verdict == "not built" and found.not_built
    else:
        assert found.verdict == "refused", found


def with_a_window(family: str) -> bool:
    return "sliding_window" in vars(family_config(family).get_text_config())


NO_SLIDING_LAYERS = ("cohere_compass_text", "minimax", "nemotron_h")  # their code knows no such kind


@pytest.mark.parametrize("family", [name for name in EXACT if with_a_window(name) and name not in NO_SLIDING_LAYERS])
def test_a_window_that_the_default_config_leaves_off_is_kept(family: str) -> None:
    config = tiny(family).config.get_text_config()
    changes: dict[str, object] = {"use_sliding_window": True, "sliding_window": 7}
    if kinds := getattr(config, "layer_types", None):
        changes["layer_types"] = ["sliding_attention" if kind == "full_attention" else kind for kind in kinds]
    model = tiny(family, **changes).eval()
    docs = documents((40, 20))
    with torch.no_grad():
        alone = model(input_ids=docs[0][None], use_cache=False).logits[0]
        found = torch_backend.patch(model, verify=False)(**collate(docs)).logits[0, :40]
    assert (found - alone).abs().max() <= 1e-4 * alone.abs().max()


def test_families_say_what_their_rows_cost() -> None:
    """By that their documents are cut over ranks: into one piece for each rank where no layer has attention."""
    costs = {family: Cost.from_config(family_config(family)) for family, route in EXACT.items() if route == "attention"}
    recurrent_alone = [family for family, cost in costs.items() if not (cost.squares or cost.windows)]
    assert recurrent_alone == ["falcon_mamba", "mamba", "mamba2"]


@pytest.mark.parametrize("family", ["bert", "bart", "bert-generation", "musicgen", "prophetnet", "t5"])
def test_encoders_and_halves_of_encoder_decoders_are_refused_by_one_rule(family: str) -> None:
    alone = "it is an encoder, or the decoder of an encoder-decoder"
    reason = alone if family.startswith("bert") else "it is an encoder-decoder"
    assert refusal(family, CONFIG_MAPPING[family]()) == f"{family} cannot be trained packed: {reason}"


def test_a_refused_model_is_left_as_it_was() -> None:
    model = tiny("xlnet", d_head=16)
    with pytest.raises(UnsupportedModelError, match="xlnet cannot be trained packed: it sees tokens on both sides"):
        torch_backend.patch(model)
    assert state_of(model) is None and not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("gemma2", {"sliding_attention", "full_attention"}),
        ("llama4_text", {"chunked_attention", "full_attention"}),
        ("qwen3_next", {"linear_attention", "full_attention"}),
        ("lfm3", {"conv", "sliding_attention", "full_attention"}),
    ],
)
def test_the_tiny_config_keeps_every_layer_kind(family: str, kinds: set[str]) -> None:
    assert set(tiny_config(family_config(family)).layer_types) == kinds <= set(family_config(family).layer_types)


def test_the_tiny_config_keeps_the_head_width_and_the_grouping() -> None:
    config = tiny_config(CONFIG_MAPPING["llama"](num_attention_heads=32, num_key_value_heads=8, hidden_size=4096))
    assert (config.head_dim, config.num_attention_heads, config.num_key_value_heads) == (128, 4, 2)
    layers = tiny_model(tiny_config(family_config("gemma4_text"))).model.layers
    assert [layer.self_attn.head_dim for layer in layers] == [256, 512]


TABLE = PAGE.partition("| experts of packed calls |")[2].partition("<!--")[0]
ROWS = {
    family: (kept, replay)
    for kept, replay, families in re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", TABLE, re.MULTILINE)
    for family in families.split(", ")
    if kept != "---"
}


@pytest.mark.parametrize("family", all_families())
def test_a_family_is_as_its_row_says(family: str) -> None:
    found = audit_family_experts(family)
    assert (found is not None) == (family in ROWS)
    if found is not None:
        kept, replay = ROWS[family]
        assert found.report.verdict == "exact", str(found.report)
        assert kept == ("ours" if found.kept is None else f"transformers': {found.kept}")
        assert replay == ("yes" if found.replay is None else f"refused: {found.replay}")


def test_the_page_counts_its_rows() -> None:
    ours, replayed = (sum(row[i] == text for row in ROWS.values()) for i, text in ((0, "ours"), (1, "yes")))
    assert f"Of the {len(ROWS)} families" in PAGE
    assert f"{len(ROWS)} are exact, {ours} run on our kernels and {replayed} can be replayed." in PAGE
