"""balance: every row once, equal ranks, and steps whose ranks finish together."""

from __future__ import annotations

import pickle
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packing_core import pack_tree
from packing_core.errors import LayoutError, PackingError
from packing_core.planning.balance import ShardedPlan, balance
from packing_core.planning.context import context_plan
from packing_core.planning.cost import Cost
from packing_core.planning.plan import PackPlan, plan

LENGTHS = np.random.default_rng(0).integers(1, 33, 60)
LLAMA_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def heavy_tail(n: int = 20_000, seed: int = 0) -> PackPlan:
    lengths = np.random.default_rng(seed).lognormal(np.log(3000) - 1.3**2 / 2, 1.3, n)
    return plan(np.clip(lengths, 1, 65_536).astype(np.int64), 65_536, seed=seed)


@given(
    lengths=st.lists(st.integers(1, 50), min_size=8, max_size=80),
    world_size=st.integers(1, 4),
    rows_per_step=st.integers(1, 3),
    seed=st.none() | st.integers(0, 5),
)
def test_every_row_is_dealt_once_and_ranks_are_equal(lengths, world_size, rows_per_step, seed) -> None:
    rows = plan(lengths, 50, max_segments=2)
    sharded = balance(rows, world_size, rows_per_step=rows_per_step, seed=seed)
    assert sharded.steps.shape == (-(-rows.n_rows // (world_size * rows_per_step)), world_size, rows_per_step)
    ranks = [sharded.rank(w) for w in range(world_size)]
    assert sorted(row for rank in ranks for step in rank for row in step.tolist()) == list(range(rows.n_rows))
    assert all(len(rank) == len(sharded) for rank in ranks)
    assert all(len(step) == rows_per_step for rank in ranks for step in rank[:-1])  # only the last step may be short


@pytest.mark.parametrize("rows_per_step", [1, 4])
def test_sixty_four_ranks_wait_for_nobody_on_heavy_tailed_documents(rows_per_step) -> None:
    rows = heavy_tail(300_000)
    cost = Cost(tokens=0, squares=1)  # attention alone, the most uneven cost there is
    random_order = ShardedPlan(rows, np.arange(rows.n_rows // 64 * 64).reshape(-1, 64, 1), cost)
    assert random_order.imbalance > 1.5
    assert balance(rows, 64, rows_per_step=rows_per_step).imbalance < 1.01


def test_no_rank_always_carries_the_most() -> None:
    sharded = balance(heavy_tail(2_000), 4, cost=Cost(1, 1))
    most = np.bincount(sharded.loads.argmax(axis=1), minlength=4)
    assert most.max() < len(sharded) / 2


def test_what_does_not_divide_is_the_cheapest_step() -> None:
    rows = plan([6, 5, 4, 3, 2], 6, max_segments=1, seed=None)
    sharded = balance(rows, 2, cost=Cost(1, 0), seed=None)
    assert sharded.loads.tolist() == [[6.0, 5.0], [4.0, 3.0], [2.0, 0.0]]
    assert [step.tolist() for step in sharded.rank(1)][-1] == []


def test_the_cost_of_a_row_is_its_tokens_and_its_squares() -> None:
    rows = plan([3, 2, 4], 5, strategy="sequential", seed=None)  # [3 2] [4]
    assert Cost(2, 10).of_rows(rows).tolist() == [2 * 5 + 10 * (9 + 4), 2 * 4 + 10 * 16]


ATTENTION = 1.75  # times as long as an operation of a product


def test_the_ratio_of_a_config_is_that_of_the_time_of_its_operations() -> None:
    # A layer: q and o, k and v, three feed-forward matrices; then the head.
    layer = 2 * 2 * 4096 * 4096 + 2 * 2 * 4096 * 1024 + 3 * 2 * 4096 * 14336
    wanted = 32 * (2 * 4096) / (32 * layer + 2 * 4096 * 128256)
    assert Cost.from_config(LLAMA_8B).squares == pytest.approx(ATTENTION * wanted)
    assert Cost.from_config(SimpleNamespace(**LLAMA_8B)) == Cost.from_config(LLAMA_8B)
    assert Cost().squares == pytest.approx(ATTENTION * wanted, rel=0.05)


def test_latent_attention_costs_its_own_projections() -> None:
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    queries, keys = 4096 * 32 * 192, 4096 * (512 + 64) + 512 * 32 * (128 + 128)
    layer = 2 * (queries + keys + 32 * 128 * 4096) + 3 * 2 * 4096 * 14336
    wanted = 32 * 32 * (192 + 128) / (32 * layer + 2 * 4096 * 128256)
    assert Cost.from_config(LLAMA_8B | latent).squares == pytest.approx(ATTENTION * wanted)


def test_a_config_that_leaves_the_widths_out_means_the_usual_ones() -> None:
    gpt2 = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    spelt_out = {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 64,
        "intermediate_size": 4 * 768,
        "vocab_size": 50257,
    }
    assert Cost.from_config(gpt2) == Cost.from_config(spelt_out) == Cost.from_config(gpt2 | {"n_inner": 3072})
    assert Cost.from_config(gpt2) != Cost.from_config(spelt_out | {"num_key_value_heads": 1})


def test_rows_of_shared_beginnings_cost_what_their_queries_meet() -> None:
    # [10 of a prompt, 2, 3] [9 of a document]: an answer of n tokens meets n (n + 2 * 10) keys
    documents = [[1] * 10 + [2] * 2, [1] * 10 + [3] * 3, [4] * 9]
    batch = pack_tree(documents, 16, prompt_lengths=[10, 10, 0], shortest=4, seed=None)
    assert batch.parents.tolist() == [-1, 0, 0, -1]
    tree, alone = 15 + (10**2 + 2 * 22 + 3 * 23), 9 + 9**2
    assert Cost(1, 1).of_rows(batch).tolist() == [tree, alone]
    dealt = balance(batch, 2, cost=Cost(1, 1), seed=None)
    assert dealt.loads.tolist() == [[tree, alone]] and dealt.n_rows == 2
    assert [batch[rows].n_tokens for rank in (0, 1) for rows in dealt.rank(rank)] == [15, 9]
    dealt.composition()


def test_layers_of_sizes_of_their_own_cost_what_they_are() -> None:
    """As in Gemma 4, whose config objects raise where a size that differs is read from the whole."""

    class Whole:
        is_heterogeneous = True
        hidden_size, num_hidden_layers, num_attention_heads, intermediate_size = 8, 2, 2, 16
        per_layer_config = (
            SimpleNamespace(num_attention_heads=2, head_dim=4, intermediate_size=16),
            SimpleNamespace(num_attention_heads=2, head_dim=16, intermediate_size=16),
        )

        @property
        def head_dim(self) -> int:
            raise RuntimeError("'head_dim' is a per-layer attribute")

    fields = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "head_dim": 4,
    }
    mlps, projections = 2 * 6 * 8 * 16, 2 * 8 * (4 + 16) * 8
    assert Cost.operations(Whole()) == Cost(mlps + projections, 2 * 2 * (4 + 16))
    assert Cost.operations(fields | {"per_layer_config": {"1": {"head_dim": 16}}}) == Cost.operations(Whole())


def test_layers_of_windows_of_their_own_cost_what_they_see() -> None:
    """As in NeoMME, whose config object raises where ``sliding_window`` is read from the whole."""

    class Whole:
        is_heterogeneous = True
        hidden_size, num_hidden_layers, num_attention_heads = 8, 2, 2
        per_layer_config = (
            SimpleNamespace(num_attention_heads=2, sliding_window=None),
            SimpleNamespace(num_attention_heads=2, sliding_window=5),
        )

        @property
        def sliding_window(self) -> int:
            raise RuntimeError("'sliding_window' is a per-layer attribute")

    cost = Cost.operations(Whole())
    assert (cost.squares, cost.windows) == (2 * 2 * 4, ((5, 2 * 2 * 4),))
    fields = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    assert Cost.operations(fields | {"per_layer_config": {"1": {"sliding_window": 5}}}) == cost


def test_a_model_of_recurrent_layers_alone_costs_tokens_alone() -> None:
    """As Mamba, whose config names no heads; each layer has projections of 3 h e h and 3 products with the state."""
    mamba = {"hidden_size": 8, "num_hidden_layers": 5, "state_size": 4, "expand": 2, "vocab_size": 10}
    assert Cost.operations(mamba) == Cost(2 * 8 * 10 + 5 * (6 * 8 * 16 + 6 * 16 * 4), 0)
    assert Cost.from_config(mamba) == Cost(1, 0)


def test_a_size_that_is_listed_for_each_layer_counts_in_its_layer() -> None:
    """As the width of the feed-forward blocks of Gemma 3n."""
    listed = LLAMA_8B | {"intermediate_size": [14336] * 31 + [8192]}
    less = 6 * 4096 * (14336 - 8192)
    assert Cost.operations(listed).tokens == Cost.operations(LLAMA_8B).tokens - less
    with pytest.raises(PackingError, match="intermediate_size must be an integer of at least 1, got"):
        Cost.operations(LLAMA_8B | {"intermediate_size": [14336]})


def test_a_mixture_costs_the_experts_that_a_token_visits() -> None:
    mixture = LLAMA_8B | {"num_experts_per_tok": 2, "moe_intermediate_size": 7168, "num_experts": 64}
    assert Cost.from_config(mixture) == Cost.from_config(LLAMA_8B)


def test_layers_with_a_window_cost_the_pairs_that_their_queries_see() -> None:
    for window in (1, 3, 8):
        for length in (1, 2, 3, 7, 8, 20):
            for before in (0, 2, 9):
                places = range(before, before + length)
                pairs = sum(min(place + 1, window) for place in places)
                # a full square counts n^2 for n (n + 1) / 2 pairs, so each query counts twice its pairs less one, and
                # past the window twice the window
                wanted = 2 * pairs - sum(place < window for place in places)
                found = Cost(0, 0, windows=((window, 1.0),)).of_segments([length], before=[before])
                assert found[0] == wanted


GEMMA = {
    "hidden_size": 1152,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 6912,
    "vocab_size": 262_144,
    "sliding_window": 512,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
}


def test_windows_and_recurrent_layers_of_a_config_cost_what_they_compute() -> None:
    cost = Cost.operations(GEMMA)
    assert cost.squares == 2 * 4 * 256
    assert cost.windows == ((512, 5 * 2 * 4 * 256),)
    assert Cost.operations({"text_config": GEMMA, "model_type": "gemma3"}) == cost
    hybrid = GEMMA | {"layer_types": ["linear_attention"] * 5 + ["full_attention"], "sliding_window": None}
    assert Cost.operations(hybrid).squares == 2 * 4 * 256
    assert Cost.operations(hybrid).windows == ()
    jamba = GEMMA | {"layer_types": None, "attn_layer_period": 3, "attn_layer_offset": 1, "sliding_window": None}
    assert Cost.operations(jamba).squares == 2 * 2 * 4 * 256
    unused = GEMMA | {"layer_types": None, "use_sliding_window": False}
    assert Cost.operations(unused).squares == 6 * 2 * 4 * 256
    everywhere = GEMMA | {"layer_types": None}
    assert (Cost.operations(everywhere).squares, len(Cost.operations(everywhere).windows)) == (0, 1)
    chunked = GEMMA | {"layer_types": ["chunked_attention"] * 6, "attention_chunk_size": 1024}
    assert Cost.operations(chunked).windows == ((512, 6 * 2 * 4 * 256),)


def test_experts_cost_those_that_are_visited_the_shared_ones_and_the_dense_layers() -> None:
    dense = Cost.operations(LLAMA_8B).tokens
    mixture = LLAMA_8B | {"num_experts_per_tok": 8, "moe_intermediate_size": 1024, "num_experts": 64}
    block, width = 6 * 4096 * 14336, 6 * 4096 * 1024
    assert Cost.operations(mixture).tokens == dense + 32 * (8 * width - block)
    assert Cost.operations(mixture | {"n_shared_experts": 2}).tokens == dense + 32 * (10 * width - block)
    assert Cost.operations(mixture | {"first_k_dense_replace": 3}).tokens == dense + 29 * (8 * width - block)


def test_latent_attention_costs_its_own_widths() -> None:
    config = LLAMA_8B | {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    assert Cost.operations(config).squares == 32 * 32 * (192 + 128)


def test_image_tokens_cost_the_vision_tower() -> None:
    tower = {"hidden_size": 1280, "depth": 32, "intermediate_size": 3420, "spatial_merge_size": 2}
    cost = Cost.operations({"text_config": LLAMA_8B, "vision_config": tower})
    patch = 32 * (8 * 1280**2 + 4 * 1280 * 3420)
    assert cost.vision == 4 * patch + 2 * 4 * 1280 * 4096
    rows = plan([4, 4, 4, 4], 8, seed=None)
    images = np.array([0, 3, 0, 1])
    assert Cost(1, 0, vision=10).of_rows(rows, vision_tokens=images).tolist() == [8 + 30, 8 + 10]
    dealt = balance(plan(LENGTHS, 64), 2, cost=Cost(1, 0, vision=1), vision_tokens=np.arange(len(LENGTHS)))
    assert dealt.loads.sum() == LENGTHS.sum() + np.arange(len(LENGTHS)).sum()
    with pytest.raises(LayoutError, match="vision_tokens has 3 entries from 0 on and the plan is of 4 documents"):
        Cost().of_rows(rows, vision_tokens=[0, 1, 2])


def test_audio_tokens_cost_the_encoder() -> None:
    """Two positions of Whisper's encoder for each token; of a model with a vision tower too, by what it packs."""
    encoder = {"model_type": "qwen2_audio_encoder", "d_model": 1280, "encoder_layers": 32, "encoder_ffn_dim": 5120}
    config = {"text_config": LLAMA_8B, "audio_config": encoder}
    position = 32 * (8 * 1280**2 + 4 * 1280 * 5120)
    assert Cost.operations(config).vision == 2 * position + 2 * 1280 * 4096
    seeing = config | {"vision_config": {"hidden_size": 64, "depth": 1}}
    assert Cost.operations(seeing).vision < Cost.operations(config).vision
    thinker = seeing | {"model_type": "qwen2_5_omni_thinker"}
    assert Cost.operations(thinker).vision == Cost.operations(config).vision


def test_a_row_that_is_cut_over_ranks_costs_what_the_slowest_of_them_carries() -> None:
    # over two ranks a row of [8] or [4 4] is halved, and [6 2] gives 6 whole tokens to one rank or 4 to each if cut
    rows = plan([8, 4, 4, 5, 3], 8, seed=None, strategy="sequential")
    cost = Cost(1, 0.1)
    dealt = balance(rows, 3, cost=cost, context_parallel=2, seed=None)
    wanted = sorted(context_plan(rows.length[a:b], 2, cost=cost).loads.max() for a, b in pairwise(rows.row_offsets))
    assert sorted(dealt.loads.reshape(-1).tolist()) == wanted
    assert dealt.loads.max() < cost.of_rows(rows).max()
    assert pickle.loads(pickle.dumps(dealt)).loads.tolist() == dealt.loads.tolist()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda p: Cost(1, 0, windows=((0, 1.0),)), "cost has a window of 0 tokens: pass an integer of at least 1"),
        (lambda p: Cost(1, 0, vision=-1), "cost has windows=.* and vision=-1: pass factors of 0 or more"),
        (lambda p: balance(p, 0), "world_size must be an integer of at least 1, got 0"),
        (lambda p: balance(p, 2.0), "world_size must be an integer of at least 1, got 2.0"),
        (lambda p: balance(p, 2, rows_per_step=0), "rows_per_step must be an integer of at least 1, got 0"),
        (lambda p: balance(p, 2, seed=-1), "seed must be an integer of at least 0, or None for no shuffling; got -1"),
        (lambda p: balance(p, 4), "the plan has 2 rows and there are 4 ranks: lower the capacity"),
        (lambda p: balance(p, 2).rank(2), "rank is 2 and the plan is for ranks 0 to 1"),
        (lambda p: Cost(-1, 0), "cost has tokens=-1 and squares=0: pass factors of 0 or more, not both 0"),
        (lambda p: Cost(0, 0), "not both 0"),
        (lambda p: Cost.from_config({"hidden_size": 8}), "the config names no hidden_size, num_hidden_layers"),
    ],
)
def test_bad_input_says_what_and_the_way_out(call, text) -> None:
    with pytest.raises(PackingError, match=text):
        call(plan([3, 2, 4], 5, seed=None))


def test_steps_of_a_wrong_shape_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"steps is int64 \[2\]: pass int64 \[steps, ranks, rows\]"):
        ShardedPlan(plan([3], 5), np.zeros(2, np.int64), Cost())
