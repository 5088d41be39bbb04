"""The step with losses, filters, dropout and dtypes of the user's own, and with models that are no `Decoder`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers
from flax import linen, nnx

from jax_backend import linear_cross_entropy, packed_cross_entropy, segment_attention
from jax_backend.model import weights
from jax_backend.model.lora import add_adapters
from jax_backend.training.train_step import TrainStep, make_train_step
from packing_core.errors import LayoutError, PackingError, UnsupportedError, UnsupportedModelError
from tests.jax_backend.test_train_step import BATCHES, decoder, largest_difference, one_device, run

V, M = 64, 16


class Small(nnx.Module):
    """Not one of ours: an embedding, flax's attention layer with segment ids as its mask, dropout, and a head."""

    def __init__(self, rngs: nnx.Rngs, *, dropout: float = 0.0, batch_norm: bool = False) -> None:
        self.embed = nnx.Embed(V, M, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(2, M, decode=False, attention_fn=masked_by_segments, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.norm = nnx.BatchNorm(M, rngs=rngs) if batch_norm else None
        self.head = nnx.Linear(M, V, rngs=rngs)

    def __call__(self, input_ids: jax.Array, segment_ids: jax.Array, position_ids: jax.Array) -> jax.Array:
        x = self.embed(input_ids)
        return self.head(self.dropout(x + self.attend(x, mask=segment_ids)))


def masked_by_segments(query, key, value, *, mask, **unused: Any) -> jax.Array:
    return segment_attention(query, key, value, mask, implementation="xla")


def in_microbatches(batch: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    return {name: array.reshape(count, -1, *array.shape[1:]) for name, array in batch.items()}


def z_loss(model: Any, batch: dict[str, jax.Array]) -> Any:
    """Cross-entropy and a penalty on the log-sum-exp of trained tokens; reports the penalty and what was right."""
    logits = model(batch["input_ids"], batch["segment_ids"], batch["position_ids"])
    total, weight = packed_cross_entropy(logits, batch["targets"], weights=batch["loss_weights"])
    penalty = 1e-2 * (batch["loss_weights"] * jax.nn.logsumexp(logits, axis=-1) ** 2).sum()
    right = batch["loss_weights"].sum(where=logits.argmax(-1) == batch["targets"])
    return total + penalty, weight, {"penalty_sum": penalty, "accuracy": (right, weight)}


def test_a_loss_of_the_users_own_is_summed_over_microbatches_and_divided_once() -> None:
    states, found = [], []
    for count in (1, 4):
        train_step = make_train_step(decoder(), optax.sgd(0.1), loss_fn=z_loss)
        state, metrics = train_step(train_step.init(), in_microbatches(BATCHES[0], count))
        states.append(state.params)
        found.append({name: float(value) for name, value in metrics.items()})
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert largest_difference(*states) < 1e-6
    _, (plain, *_) = one_device()
    penalty = found[0]["penalty_sum"] / found[0]["weight_sum"]
    assert found[0]["loss"] == pytest.approx(plain + penalty, rel=1e-5) and penalty > 0.01
    assert 0 < found[0]["accuracy"] < 0.3


def test_a_loss_may_read_any_keys_and_microbatches_of_it_may_be_added_one_by_one() -> None:
    def of_pairs(model, batch):
        chosen, rejected = (model(*batch[name]) for name in ("chosen", "rejected"))
        return (rejected - chosen).sum(), chosen.shape[0], {"margin": (chosen - rejected).sum()}

    class Reward(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.ones((3,)))

        def __call__(self, *x):
            return jnp.stack(x) @ self.scale[...]

    rng = np.random.default_rng(0)
    batch = {name: rng.standard_normal((2, 4, 3)).astype(np.float32) for name in ("chosen", "rejected")}
    train_step = make_train_step(Reward(), optax.sgd(0.1), loss_fn=of_pairs, microbatched=True)
    state, metrics = train_step(train_step.init(), batch)
    assert float(metrics["margin"]) == pytest.approx((batch["chosen"] - batch["rejected"]).sum(), rel=1e-4)
    again, sums = train_step.init(), None
    for micro in range(2):
        sums = train_step.accumulate(again, sums, {name: x[micro : micro + 1] for name, x in batch.items()})
    again, _ = train_step.update(again, sums)
    assert largest_difference(state.params, again.params) < 1e-6
    with pytest.raises(LayoutError, match="must share their first axes, microbatches and rows"):
        train_step.place(batch | {"chosen": batch["chosen"][:1]})
    untold = make_train_step(Reward(), optax.sgd(0.1), loss_fn=of_pairs)
    with pytest.raises(LayoutError, match=r"without input_ids nothing tells \[A, B, ...\] from.*microbatched=True"):
        untold(untold.init(), batch)
    rows = {name: x.reshape(8, 3) for name, x in batch.items()}
    told = make_train_step(Reward(), optax.sgd(0.1), loss_fn=of_pairs, microbatched=False)
    assert {x.shape for x in told.place(rows).values()} == {(1, 8, 3)}
    _, again = told(told.init(), rows)
    assert float(again["loss_sum"]) == pytest.approx(float(metrics["loss_sum"]), rel=1e-4)


def with_lora() -> Any:
    model = decoder()
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            base = getattr(layer.self_attn, name)
            setattr(
                layer.self_attn,
                name,
                nnx.LoRA(base.in_features, 2, base.out_features, base_module=base, rngs=nnx.Rngs(1)),
            )
    return model


@pytest.mark.parametrize("sharded", [False, True])
def test_lora_moves_its_own_weights_and_no_others(sharded: bool) -> None:
    mesh = jax.make_mesh((4,), ("fsdp",)) if sharded else None
    model = with_lora()
    before = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
    train_step = make_train_step(model, optax.adamw(1e-2), mesh, trainable=nnx.LoRAParam)
    state = train_step.init()
    losses = []
    for _ in range(3):
        state, metrics = train_step(state, BATCHES[0])
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[0]
    assert len(jax.tree.leaves(state.opt_state[0].mu)) == 2 * 2  # two projections, A and B of each
    after = nnx.state(train_step.model(state), nnx.Param)
    moved = {
        ".".join(map(str, path))
        for (path, one), (_, other) in zip(nnx.to_flat_state(before), nnx.to_flat_state(after), strict=True)
        if not np.array_equal(one[...], other[...])
    }
    assert moved == {f"model.layers.0.self_attn.{p}.lora_{x}" for p in ("q_proj", "v_proj") for x in "ab"}
    frozen = train_step.model(state).model.embed_tokens.embedding[...]
    assert frozen.addressable_shards[0].data.size * (4 if sharded else 1) == frozen.size


@pytest.mark.parametrize("how", ["around", "inside"])
def test_a_decoder_with_lora_is_saved_as_the_weights_that_it_computes_with(how: str, tmp_path: Path) -> None:
    model = with_lora()
    for layer in model.model.layers:
        if how == "inside":
            base = layer.self_attn.q_proj.base_module
            within = nnx.LoRALinear(base.in_features, base.out_features, lora_rank=2, use_bias=False, rngs=nnx.Rngs(1))
            within.kernel = base.kernel
            layer.self_attn.q_proj = within
        for name in ("q_proj", "v_proj"):
            lora = getattr(layer.self_attn, name)
            lora = lora.lora if isinstance(lora, nnx.LoRALinear) else lora
            lora.lora_b[...] = jax.random.normal(jax.random.key(3), lora.lora_b.shape)
    weights.save(model, tmp_path)
    given = [BATCHES[0][name] for name in ("input_ids", "segment_ids", "position_ids")]
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    one = np.flatnonzero(given[1][0] == 1)
    with torch.no_grad():
        found = there(torch.tensor(given[0][:1, one])).logits[0].numpy()
    np.testing.assert_allclose(found, model(*given)[0, one], atol=2e-5)
    assert float(abs(model(*given) - decoder()(*given)).max()) > 1e-2  # and the adapters are not nothing
    assert isinstance(model.model.layers[0].self_attn.v_proj, nnx.LoRA)


def test_a_decoder_with_weights_that_its_config_does_not_describe_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"lora_A.weight.* that its config does not describe.*random weights"):
        weights.save(add_adapters(decoder(), 2, 0), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_what_is_no_optimizer_mesh_or_loss_is_named() -> None:
    with pytest.raises(PackingError, match=r"tx is an nnx.Optimizer.*pass the optax transformation, tx.tx"):
        make_train_step(decoder(), nnx.Optimizer(decoder(), optax.sgd(0.1), wrt=nnx.Param))
    with pytest.raises(PackingError, match=r"tx must be an optax transformation such as optax.adamw.*got float"):
        make_train_step(decoder(), 0.1)
    with pytest.raises(PackingError, match=r"mesh must be a jax.sharding.Mesh, got tuple: make one with"):
        make_train_step(decoder(), optax.sgd(0.1), (8,))
    with pytest.raises(UnsupportedError, match=r"the axis 'expert', and the train step would spread rows"):
        make_train_step(decoder(), optax.sgd(0.1), jax.make_mesh((2, 4), ("data", "expert")))
    make_train_step(decoder(), optax.sgd(0.1), jax.make_mesh((8, 1), ("data", "expert")))  # one device: nothing to cut
    wrong = {
        r"loss_fn must return \(loss_sum, weight_sum\).*it returned dict": lambda total: {"loss": total},
        "it returned ArrayImpl|Tracer": lambda total: total,
        r"shapes \(3,\) and \(\)": lambda total: (total * jnp.ones(3), 1.0),
        "extra maps names to values": lambda total: (total, 1.0, 2.0),
    }
    for message, loss in wrong.items():
        train_step = make_train_step(
            decoder(), optax.sgd(0.1), loss_fn=lambda model, batch, loss=loss: loss(model.lm_head.kernel[...].sum())
        )
        with pytest.raises(PackingError, match=message):
            train_step(train_step.init(), BATCHES[0])


def test_a_filter_that_selects_nothing_is_refused() -> None:
    with pytest.raises(PackingError, match="trainable selects none of the model's variables"):
        make_train_step(decoder(), optax.sgd(0.1), trainable=nnx.LoRAParam)


def test_dropout_draws_anew_in_each_microbatch_and_step_and_repeats_on_resumption() -> None:
    same = {name: np.stack([array] * 2) for name, array in BATCHES[0].items()}

    def losses(train_step: TrainStep, state: Any, steps: int) -> tuple[Any, list[float]]:
        found = []
        for _ in range(steps):
            state, metrics = train_step(state, same)
            found.append(float(metrics["loss"]))
        return state, found

    frozen = optax.set_to_zero()  # weights stay, so only what dropout draws can change the loss
    step = make_train_step(Small(nnx.Rngs(0), dropout=0.5), frozen)
    state, found = losses(step, step.init(), 2)
    assert found[0] != found[1]
    _, (third,) = losses(step, jax.tree.map(jnp.copy, state), 1)
    resumed = make_train_step(Small(nnx.Rngs(0), dropout=0.5), frozen)
    assert losses(resumed, state, 1)[1] == [third]
    _, metrics = step(step.init(), BATCHES[0])
    assert float(metrics["loss"]) != pytest.approx(found[0], rel=1e-5)  # the same rows twice differ from once
    still = make_train_step(nnx.view(Small(nnx.Rngs(0), dropout=0.5), deterministic=True), frozen)
    assert len(set(losses(still, still.init(), 2)[1])) == 1


def test_batch_statistics_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"batch statistics \(norm.mean\), which mix the documents"):
        make_train_step(Small(nnx.Rngs(0), batch_norm=True), optax.sgd(0.1))


class Linen(linen.Module):
    @linen.compact
    def __call__(self, input_ids):
        return linen.Dense(V)(linen.Embed(V, M)(input_ids))


def test_linen_modules_are_refused_with_the_way_out_that_works() -> None:
    module = Linen()
    for given in (module, Linen):
        with pytest.raises(UnsupportedModelError, match="Linen is a flax.linen module.*nnx.bridge.ToNNX"):
            make_train_step(given, optax.sgd(0.1))
    wrapped = nnx.bridge.lazy_init(nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)), BATCHES[0]["input_ids"])

    def loss(model, batch):
        return packed_cross_entropy(model(batch["input_ids"]), batch["targets"], weights=batch["loss_weights"])

    train_step = make_train_step(wrapped, optax.adam(1e-2), loss_fn=loss)
    state = train_step.init()
    found = []
    for _ in range(3):
        state, metrics = train_step(state, BATCHES[0])
        found.append(float(metrics["loss"]))
    assert found[2] < found[1] < found[0]


def test_any_module_trains_and_casts_its_weights_for_the_computation() -> None:
    seen = []

    def loss(model, batch):
        seen.append({model.embed.embedding[...].dtype, model.head.kernel[...].dtype})
        hidden = model.embed(batch["input_ids"])
        return linear_cross_entropy(hidden, model.head.kernel[...], batch["targets"], weights=batch["loss_weights"])

    train_step = make_train_step(Small(nnx.Rngs(0)), optax.sgd(0.1), loss_fn=loss, compute_dtype=jnp.bfloat16)
    state, _ = train_step(train_step.init(), BATCHES[0])
    assert seen[-1] == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    _, _, wanted = run(BATCHES[:1], tx=optax.sgd(0.1))
    own = make_train_step(decoder(), optax.sgd(0.1), compute_dtype=jnp.bfloat16)
    _, metrics = own(own.init(), BATCHES[0])
    assert float(metrics["loss"]) == pytest.approx(wanted[0], rel=1e-2) and float(metrics["loss"]) != wanted[0]


@pytest.mark.parametrize("dtype", [jnp.float16, "float16", jnp.int8])
def test_a_dtype_in_which_small_gradients_become_0_is_refused(dtype) -> None:
    with pytest.raises(UnsupportedError, match="small gradients would become 0"):
        make_train_step(decoder(), optax.sgd(0.1), compute_dtype=dtype)


def test_weights_of_a_negative_sum_train_as_their_quotient_says() -> None:
    """Advantages weigh targets, and a batch of bad answers has a sum below 0."""
    batch = BATCHES[0] | {"loss_weights": -BATCHES[0]["loss_weights"]}
    (_, wanted, losses), (_, state, found) = (run([each], tx=optax.sgd(0.1)) for each in (BATCHES[0], batch))
    assert found == pytest.approx(losses, rel=1e-6)
    assert largest_difference(state.params, wanted.params) < 1e-6


def test_a_step_is_compiled_for_the_keys_that_a_loss_of_ones_own_reads() -> None:
    def loss_fn(model, batch):
        total, weight = model.loss(batch)
        return total + (batch["advantages"] * batch["loss_weights"].sum(1)).sum(), weight

    rows_of = BATCHES[0]["input_ids"].shape
    for mesh in (None, jax.make_mesh((8,), ("data",))):
        train_step = make_train_step(decoder(), optax.sgd(0.1), mesh, loss_fn=loss_fn)
        shape = {"rows": rows_of[0], "tokens": rows_of[1]}
        compiled = train_step.compile(**shape, more={"advantages": jax.ShapeDtypeStruct(rows_of[:1], "float32")})
        assert compiled.memory_analysis() is not None
        with pytest.raises(PackingError, match=r"loss_fn reads batch\['advantages'\]: pass compile\(more="):
            train_step.compile(**shape)
