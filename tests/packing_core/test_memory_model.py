"""The memory of a training step by a formula: against measured steps, and against a count of what a layer keeps."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from packing_core.errors import PackingError, UnsupportedModelError
from packing_core.training.memory_model import GIB, LEVELS, USABLE, MemoryModel, loss_chunk

QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4_864,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4_096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "vocab_size": 128_256,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2_880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2_880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 201_088,
}


@pytest.mark.parametrize(
    ("level", "tokens", "measured"),
    [
        ("none", 16_384, 14.16),
        ("none", 57_344, 40.1),
        ("selective", 16_384, 7.03),
        ("attention", 16_384, 5.56),
        ("full", 16_384, 4.89),
        ("offload", 16_384, 4.90),
        ("none", 65_536, 45.66),
        ("selective", 65_536, 17.15),
        ("attention", 65_536, 11.26),
        ("full", 65_536, 8.44),
        ("offload", 65_536, 6.04),
    ],
)
def test_within_five_percent_of_a_measured_step(level: str, tokens: int, measured: float) -> None:
    """GiB of benchmarks/RESULTS.md, on an H100 and an H200."""
    assert MemoryModel.from_config(QWEN2).bytes(level, tokens) / GIB == pytest.approx(measured, rel=0.05)


MEASURED_WITH_ADAPTERS = {  # GiB allocated on an H200, benchmarks/RESULTS.md
    ("none", 8_192): 40.00,
    ("selective", 8_192): 27.00,
    ("attention", 8_192): 22.13,
    ("full", 8_192): 20.26,
    ("offload", 8_192): 18.52,
    ("selective", 32_768): 62.05,
    ("attention", 32_768): 42.59,
    ("full", 32_768): 35.10,
    ("offload", 32_768): 27.92,
}


@pytest.mark.parametrize(("level", "tokens"), MEASURED_WITH_ADAPTERS)
def test_within_five_percent_of_a_measured_step_with_adapters(level: str, tokens: int) -> None:
    measured = MEASURED_WITH_ADAPTERS[level, tokens]
    assert MemoryModel.from_config(LLAMA, rank=16).bytes(level, tokens) / GIB == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(("tokens", "measured"), [(393_216, 31.60), (1_200_000, 87.82)])
def test_within_five_percent_of_a_measured_document(tokens: int, measured: float) -> None:
    """Two layers of the 8B shape, all weights, an optimizer without states; they share an input on the host."""
    memory = MemoryModel.from_config(LLAMA | {"num_hidden_layers": 2}, states=0)
    assert memory.bytes("offload", tokens, group=2) / GIB == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(("tokens", "measured"), [(131_072, 17.77), (500_000, 44.06)])
def test_within_five_percent_of_a_measured_document_of_experts(tokens: int, measured: float) -> None:
    """Four layers of gpt-oss-20b, adapters of rank 16 on attention."""
    memory = MemoryModel.from_config(GPT_OSS | {"num_hidden_layers": 4}, rank=16, adapted=4 * 16)
    assert memory.bytes("offload", tokens) / GIB == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(("double", "bits"), [(False, 4.5), (True, 4 + 8.125 / 64)])
def test_weights_in_4_bits_take_half_a_byte_and_their_blocks(double: bool, bits: float) -> None:
    """Projections alone; the values of one weight wait beside them."""
    stored = {"quantization_config": {"load_in_4bit": True, "bnb_4bit_use_double_quant": double}}
    dense, packed = (MemoryModel.from_config(LLAMA | more, rank=16) for more in ({}, stored))
    values = 32 * (2 * 4_096 * (4_096 + 1_024) + 3 * 4_096 * 14_336)
    assert dense.fixed - packed.fixed == pytest.approx(values * (2 - bits / 8) - 2 * 4_096 * 14_336, rel=1e-6)


def test_experts_in_mxfp4_take_17_bytes_for_32_values() -> None:
    """The values of a first product wait beside them."""
    stored = {"quantization_config": {"quant_method": "mxfp4"}}
    dense, packed = (MemoryModel.from_config(GPT_OSS | more, rank=16) for more in ({}, stored))
    one = 32 * 2_880 * 2_880
    assert dense.fixed - packed.fixed == 24 * 3 * one * 2 - 24 * 3 * one * 17 // 32 - 2 * 2 * one


def test_a_layer_keeps_what_its_backward_reads() -> None:
    """By hand: D = 8, two heads of 4 for queries, one for keys and values, an MLP of 2 x 24 columns, 2 bytes each."""
    config = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {"num_key_value_heads": 1, "intermediate_size": 24, "vocab_size": 10}
    memory = MemoryModel.from_config(config | sizes)
    inputs_of_norms, queries, keys, values, output, inner, statistics = 2 * 8, 8, 4, 4, 8, 2 * 24, 2 * 4
    narrow = inputs_of_norms + queries + keys + values + output
    assert memory.kept["none"] == 2 * (narrow + inner) + statistics
    assert memory.kept["selective"] == 2 * narrow + statistics
    assert memory.kept["attention"] == 2 * (8 + output) + statistics
    assert memory.kept["full"] == memory.host == 2 * 8
    weights = 2 * 10 * 8 + 8 * (8 + 4 + 4) + 8 * 8 + 3 * 8 * 24 + 2 * 8 + 8
    assert memory.fixed == 2 * weights * (1 + 1 + 2)


def test_norms_of_queries_and_norms_behind_layers_keep_more() -> None:
    plain, queries, behind = (MemoryModel.from_config(LLAMA | {"model_type": m}) for m in ("llama", "qwen3", "glm4"))
    assert queries.kept["none"] - plain.kept["none"] == 32 * 2 * (4_096 + 1_024)
    assert behind.kept["none"] - plain.kept["none"] == 32 * 2 * 4_096
    assert queries.kept["selective"] == plain.kept["selective"], "which normalises and rotates them again"


def test_selective_keeps_the_inner_columns_of_a_narrow_mlp() -> None:
    """Products at most twice as wide as their input: 1,792 columns of 896."""
    narrow, wide = (MemoryModel.from_config(QWEN2 | {"intermediate_size": size}) for size in (1_792, 1_793))
    assert narrow.kept["selective"] == narrow.kept["none"] and wide.kept["selective"] < wide.kept["none"]


def test_the_longest_row_fits_and_the_next_does_not() -> None:
    memory, device = MemoryModel.from_config(QWEN2), 80 * GIB
    found = {level: memory.longest(level, device) for level in LEVELS}
    assert list(found.values()) == sorted(found.values())
    for level, tokens in found.items():
        assert memory.bytes(level, tokens) <= USABLE * device < memory.bytes(level, tokens + 1)
        assert memory.fastest(tokens, device) == level
    assert memory.fastest(found["offload"] + 1, device) is None
    assert memory.longest("none", 2 * GIB) == 0


def test_layers_share_inputs_where_the_host_ends() -> None:
    """Six layers: six inputs on the host, then of every second, third, and of the first alone."""
    memory = MemoryModel.from_config(QWEN2 | {"num_hidden_layers": 6})
    one = 1_000 * memory.hidden
    assert [memory.group(1_000, inputs * one) for inputs in (7, 6, 5, 3, 2, 1)] == [1, 1, 2, 2, 3, 6]
    assert memory.group(1_000, one - 1) is None and memory.group(1_000) == 1
    # a group's inputs are on the device at once
    sizes = [memory.bytes("offload", 65_536, group=group) for group in (2, 3, 6)]
    assert sizes == sorted(sizes)


def test_offloading_ends_where_the_host_holds_no_input_of_a_layer() -> None:
    memory = MemoryModel.from_config(QWEN2)
    tokens = memory.longest("full", 80 * GIB) + 1
    assert memory.fastest(tokens, 80 * GIB, tokens * memory.host) == "offload"
    assert memory.fastest(tokens, 80 * GIB, 4 * tokens * memory.hidden) == "offload", "six layers share"
    assert memory.fastest(tokens, 80 * GIB, tokens * memory.hidden - 1) is None
    assert memory.longest("offload", 80 * GIB, 100 * memory.hidden) == 100


def test_experts_keep_their_first_product_at_the_selective_level_and_have_no_tiles_there() -> None:
    memory, dense = MemoryModel.from_config(GPT_OSS), MemoryModel.from_config(LLAMA)
    first_product = 2 * 4 * 2 * 2_880
    assert memory.kept["none"] == memory.kept["selective"] > 24 * first_product
    assert memory.kept["full"] == 24 * 2 * 2_880
    experts = MemoryModel.from_config(GPT_OSS, tiles=["mlp"])
    of_inputs = {"attention", "full", "offload"}
    assert set(experts.tiled) == of_inputs and set(dense.tiled) == {"selective", *of_inputs}


MAMBA2 = {
    "hidden_size": 64,
    "vocab_size": 96,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "head_dim": 32,
    "n_groups": 2,
    "state_size": 16,
    "conv_kernel": 4,
}


def test_a_layer_of_mamba_2_keeps_what_its_backward_reads() -> None:
    """By hand: 128 inner columns, two groups of states of 16, so that 128 + 2 x 32 go through the convolution."""
    memory = MemoryModel.from_config(MAMBA2 | {"model_type": "mamba2"}, itemsize=4)
    through, gate_and_output, gates = 2 * 192, 2 * 128, 3 * 4
    assert memory.kept["none"] == 2 * 4 * (64 + through + gate_and_output + gates)
    assert memory.kept["full"] == 2 * 4 * 64 and memory.tiled == {}, "there is no MLP"
    weights = 64 * (128 + 192 + 4) + 128 * 64 + 192 * 4 + 128 + 64
    assert memory.gradients == 4 * (2 * weights + 2 * 96 * 64 + 64)


def test_layers_of_hybrids_are_counted_by_kind() -> None:
    hybrid = QWEN2 | {f"mamba_{name}": size for name, size in (("n_heads", 4), ("d_head", 64), ("d_state", 16))}
    plain = MemoryModel.from_config(QWEN2 | {"head_dim": 64})
    bamba = MemoryModel.from_config(hybrid | {"model_type": "bamba", "head_dim": 64, "attn_layer_indices": range(24)})
    assert bamba.kept == plain.kept, "attention in every layer"
    one = MemoryModel.from_config(hybrid | {"model_type": "bamba", "head_dim": 64, "attn_layer_indices": [3]})
    mamba = 2 * (2 * (256 + 2 * 16) + 2 * 256) + 3 * 4 * 4
    attention = 2 * (2 * 896 + 2 * 128) + 4 * 14
    assert plain.kept["none"] - one.kept["none"] == 23 * (attention - mamba)
    both = MemoryModel.from_config(hybrid | {"model_type": "falcon_h1", "head_dim": 64})
    assert both.kept["none"] - plain.kept["none"] == 24 * mamba
    assert both.tiled == {}, "its MLP multiplies by constants"


def test_gates_of_shared_experts_and_norms_of_families_keep_what_they_read() -> None:
    one = 24 * 2  # layers, bytes
    plain, dots, exaone = (
        MemoryModel.from_config(QWEN2 | {"model_type": family}).kept["none"] for family in ("qwen2", "dots1", "exaone4")
    )
    assert dots - plain == one * (896 + 128) and exaone - dots == one * 896, "queries and keys; a norm behind"
    experts = QWEN2 | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    shared = MemoryModel.from_config(experts | {"shared_expert_intermediate_size": 32}).kept["none"]
    assert shared - MemoryModel.from_config(experts).kept["none"] == one * (896 + 2 * 32)


def test_experts_are_read_by_the_names_of_aria() -> None:
    own = {"moe_num_experts": 8, "moe_topk": 2, "moe_num_shared_experts": 1}
    usual = {"num_local_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
    found, same = (MemoryModel.from_config(QWEN2 | names) for names in (own, usual))
    assert found == same != MemoryModel.from_config(QWEN2)


def test_a_pattern_names_the_kind_of_each_layer() -> None:
    sizes = {"model_type": "nemotron_h", "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16}
    named = {"layers_block_type": ["mamba", "mlp", "attention", "moe"], "num_hidden_layers": None}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    written = {"hybrid_override_pattern": "M-*E", "num_hidden_layers": 4}
    found, same = (MemoryModel.from_config(QWEN2 | sizes | experts | way) for way in (named, written))
    assert found == same and found.layers == 4
    griffin = {
        "model_type": "recurrent_gemma",
        "lru_width": 896,
        "block_types": ["recurrent", "recurrent", "attention"],
    }
    kept = MemoryModel.from_config(QWEN2 | griffin).kept["none"]
    plain = MemoryModel.from_config(QWEN2 | {"intermediate_size": 4_864 // 2}).kept["none"]
    attention, unit = 2 * (2 * 896 + 2 * 128) + 4 * 14, 2 * 9 * 896 + 4 * 2 * 896
    assert kept - plain == 16 * (unit - attention)


def test_the_table_of_longest_documents_is_that_of_the_formula() -> None:
    page = (Path(__file__).parents[2] / "docs" / "speed.md").read_text()
    models: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "Qwen2-0.5B, all weights, AdamW": (QWEN2, {}),
        "Llama-3.1-8B, LoRA of rank 16": (LLAMA, {"rank": 16}),
        "Llama-3.1-8B, all weights, 8-bit AdamW": (LLAMA, {"states": 1}),
        "Llama-3.1-8B, all weights, optimizer on the host": (LLAMA, {"states": 0}),
        "gpt-oss-20b in bfloat16, LoRA of rank 16": (GPT_OSS, {"rank": 16}),
    }
    devices = {"80 GiB": 80 * GIB, "140 GB": int(140e9)}
    for (name, (config, options)), (device, size) in product(models.items(), devices.items()):
        memory = MemoryModel.from_config(config, **options)
        longest = (memory.longest(level, size, int(0.95 * 128e9)) // 1_000 for level in LEVELS)
        assert f"| {name} | {device} | {' | '.join(f'{tokens:,}' for tokens in longest)} |" in page


def test_later_microbatches_find_gradients_in_the_loss() -> None:
    memory = MemoryModel.from_config(QWEN2)
    more = replace(memory, accumulates=True).bytes("none", 16_384) - memory.bytes("none", 16_384)
    assert more == memory.gradients


def test_the_loss_holds_a_seventh_of_the_logits_within_bounds() -> None:
    assert loss_chunk(1, 10) == 2**29
    assert loss_chunk(7 * 2**20, 2**10) == 2**30
    assert loss_chunk(3 * 2**18, 2**10) == 3 * 2**28 and loss_chunk(3 * 2**18 + 1, 2**10) == 2**29
    assert loss_chunk(2**40, 2**10) == 2**31


@pytest.mark.parametrize(
    ("config", "error", "reason"),
    [
        ({}, PackingError, "no hidden_size, num_hidden_layers and num_attention_heads: pass that of a decoder"),
        (QWEN2 | {"hidden_size": 8.5}, PackingError, "hidden_size"),
        (QWEN2 | {"layer_types": ["linear_attention"]}, UnsupportedModelError, "layers of the kind linear_attention"),
        (QWEN2 | {"model_type": "jamba", "mamba_d_state": 16}, UnsupportedModelError, "recurrent layers of its own"),
        (QWEN2 | {"model_type": "nemotron_h", "moe_latent_size": 64}, UnsupportedModelError, "layers of its own"),
        (QWEN2 | {"kv_lora_rank": 512}, UnsupportedModelError, "attention, experts or recurrent layers of its"),
        (
            QWEN2 | {"model_type": "dbrx"},
            UnsupportedModelError,
            "dbrx keeps of a step is not known beforehand, because it has",
        ),
        (QWEN2 | {"model_type": "t5", "is_encoder_decoder": True}, UnsupportedModelError, "an encoder beside its deco"),
    ],
)
def test_what_is_not_known_is_refused(config: dict[str, Any], error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        MemoryModel.from_config(config)
