"""The optax step: the same numbers however its rows are cut into microbatches, spread over devices, or interrupted."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

import packing_core
from jax_backend.auditing import audit
from jax_backend.batches import to_batch
from jax_backend.model import weights
from jax_backend.model.decoder import REMAT, Decoder, DecoderConfig
from jax_backend.training.checkpoint import save_state
from jax_backend.training.objective import causal_lm_loss, check_optimizer
from jax_backend.training.train_step import TrainStep, make_train_step
from packing_core.errors import LayoutError, PackingError, UnsupportedModelError
from tests.jax_backend.models import CONFIGS, documents, saved


def decoder(**options) -> Decoder:
    config = DecoderConfig.from_hf(CONFIGS["llama"]().to_dict() | {"num_hidden_layers": 1})
    return Decoder(config, rngs=nnx.Rngs(0), implementation="xla", **options)  # the quickest to compile


def rows(count: int = 8, seed: int = 0) -> dict[str, np.ndarray]:
    """``count`` rows [count, 48] of unequal numbers of trained tokens."""
    sequences = documents(4 * count, seed=seed)
    prompts = [len(ids) * (i % 3) // 3 for i, ids in enumerate(sequences)]
    batch = to_batch(packing_core.pack(sequences, 48, prompt_lengths=prompts))
    assert len(batch["input_ids"]) >= count
    return {name: array[:count] for name, array in batch.items()}


def run(batches, mesh=None, tx=None, train_step=None, **options):
    train_step = train_step or make_train_step(decoder(**options), tx or optax.adamw(1e-2), mesh)
    state, losses = train_step.init(), []
    for batch in batches:
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return train_step, state, losses


@cache
def plain_step() -> TrainStep:
    """The step of plain descent on one device; its ``init`` begins from the same weights each time."""
    return make_train_step(decoder(), optax.sgd(0.1))


@cache
def one_device() -> tuple[nnx.State, list[float]]:
    """Weights and losses after the three batches under plain descent, which every way to cut them must give."""
    _, state, losses = run(BATCHES, train_step=plain_step())
    return state.params, losses


@cache
def scanned() -> tuple[nnx.State, list[float]]:
    _, state, losses = run(BATCHES[:2], tx=optax.sgd(0.1), scan_layers=True)
    return state.params, losses


def largest_difference(one, other) -> float:
    differences = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), one, other)
    return max(jax.tree.leaves(differences))


BATCHES = [rows(seed=seed) for seed in range(3)]


def test_microbatches_of_unequal_token_counts_give_the_step_of_the_whole() -> None:
    counts = [np.count_nonzero(BATCHES[0]["loss_weights"][part]) for part in (slice(0, 2), slice(2, 4))]
    assert counts[0] != counts[1]
    cut = [{name: array.reshape(4, 2, -1) for name, array in batch.items()} for batch in BATCHES]
    whole, wanted = one_device()
    _, pieces, found = run(cut, train_step=plain_step())
    assert found == pytest.approx(wanted, rel=1e-6)
    assert largest_difference(pieces.params, whole) < 1e-6


@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 2, "fsdp": 4}], ids=str)
def test_any_mesh_gives_the_numbers_of_one_device(axes) -> None:
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes))
    alone, wanted = one_device()
    _, spread, found = run(BATCHES, mesh, tx=optax.sgd(0.1))
    assert found == pytest.approx(wanted, rel=1e-6)
    assert largest_difference(spread.params, alone) < 1e-6


@pytest.mark.parametrize("axis", [None, "data"])
def test_the_model_given_stays_whole_after_steps(axis) -> None:
    mesh = None if axis is None else jax.make_mesh((8,), (axis,))
    model = decoder()
    before = jax.tree.map(lambda x: np.array(x, copy=True), nnx.state(model))
    train_step = make_train_step(model, optax.sgd(0.1), mesh)
    state, _ = train_step(train_step.init(), BATCHES[0])
    train_step(state, BATCHES[1])
    assert largest_difference(nnx.state(model), before) == 0
    assert largest_difference(train_step.init().params, nnx.state(decoder(), nnx.Param)) == 0


def test_evaluation_and_sums_take_all_microbatches_of_a_batch() -> None:
    cut = {name: array.reshape(4, 2, -1) for name, array in BATCHES[0].items()}
    train_step = plain_step()
    state = train_step.init()
    whole, pieces = (train_step.evaluate(state, [batch]) for batch in (BATCHES[0], cut))
    assert float(pieces["weight_sum"]) == float(whole["weight_sum"]) == BATCHES[0]["loss_weights"].sum()
    assert float(pieces["loss"]) == pytest.approx(float(whole["loss"]), rel=1e-6)
    sums = train_step.accumulate(state, None, cut)
    assert int(sums.microbatches) == 4
    state, _ = train_step.update(state, sums)
    again, _ = train_step(train_step.init(), BATCHES[0])
    assert largest_difference(state.params, again.params) < 1e-6


def test_precision_covers_evaluation() -> None:
    seen = []

    def loss(model, batch):
        seen.append(jax.config.jax_default_matmul_precision)
        return causal_lm_loss(model, batch)

    train_step = make_train_step(decoder(), optax.sgd(0.1), loss_fn=loss, precision="highest")
    train_step.evaluate(train_step.init(), BATCHES[:1])
    assert set(seen) == {"highest"}


def test_an_id_outside_the_vocabulary_is_refused_and_changes_nothing() -> None:
    train_step = plain_step()
    state = train_step.init()
    place = tuple(int(i) for i in np.argwhere(BATCHES[0]["loss_weights"] > 0)[3])
    for name, value in (("targets", 64), ("targets", -1), ("input_ids", 64)):
        wrong = {key: array.copy() for key, array in BATCHES[0].items()}
        wrong[name][place] = value
        with pytest.raises(LayoutError, match=rf"{name}\[{place[0]}, {place[1]}\] is {value}, and the vocabulary is 0"):
            train_step(state, wrong)
    untrained = {key: array.copy() for key, array in BATCHES[0].items()}
    untrained["targets"][untrained["loss_weights"] == 0] = -100
    train_step(state, untrained)  # which the refusals did not donate


def test_an_id_outside_the_vocabulary_in_a_devices_memory_is_nan_and_can_be_skipped() -> None:
    place = tuple(np.argwhere(BATCHES[0]["loss_weights"] > 0)[3])
    train_step = make_train_step(decoder(), optax.apply_if_finite(optax.sgd(0.1), 1))
    before = train_step.init()
    for name, value in (("targets", 64), ("input_ids", 64), ("input_ids", -3)):
        wrong = {key: jnp.asarray(array) for key, array in BATCHES[0].items()}
        wrong[name] = wrong[name].at[place].set(value)
        after, metrics = train_step(train_step.init(), wrong)
        assert np.isnan(metrics["loss"]), (name, value)
        assert largest_difference(after.params, before.params) == 0.0


def test_a_donated_state_is_named(tmp_path) -> None:
    train_step = plain_step()
    state = train_step.init()
    train_step(state, BATCHES[0])
    uses = (
        lambda: train_step(state, BATCHES[0]),
        lambda: train_step.evaluate(state, BATCHES[:1]),
        lambda: train_step.accumulate(state, None, BATCHES[0]),
        lambda: train_step.model(state),
        lambda: save_state(tmp_path / "state", state),
    )
    for use in uses:
        with pytest.raises(PackingError, match="an earlier step took the buffers of this state"):
            use()


def test_weights_and_optimizer_state_are_cut_over_fsdp_and_nothing_else() -> None:
    _, state, _ = run(BATCHES[:1], jax.make_mesh((2, 4), ("data", "fsdp")))
    kernel = state.params["model"]["layers"][0]["mlp"]["up_proj"]["kernel"][...]
    assert kernel.addressable_shards[0].data.size * 4 == kernel.size
    moments = jax.tree.leaves(state.opt_state[0].mu)
    assert all(leaf.addressable_shards[0].data.size * 4 == leaf.size for leaf in moments)


def test_a_new_segmentation_and_a_new_step_compile_nothing() -> None:
    train_step = make_train_step(decoder(), optax.adamw(1e-2))
    state = train_step.init()
    for batch in BATCHES:
        state, _ = train_step(state, batch)
    assert train_step.compilations == 1


def test_bfloat16_computes_with_float32_master_weights() -> None:
    _, state, losses = run(BATCHES, tx=optax.sgd(0.1), dtype=jnp.bfloat16, remat=True)
    _, wanted = one_device()
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert losses == pytest.approx(wanted, rel=2e-2) and losses != wanted


def test_gradients_of_bfloat16_weights_add_up_in_float32() -> None:
    one = {name: array[:1][None] for name, array in BATCHES[0].items()}
    many = {name: np.repeat(array, 32, axis=0) for name, array in one.items()}
    train_step = make_train_step(decoder(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16), optax.adamw(1e-2))
    norms = []
    for batch in (one, many):
        state, metrics = train_step(train_step.init(), batch)
        norms.append(float(metrics["grad_norm"]))
        # the optimizer keeps the weights' dtype, so that a state has one layout for the whole run
        assert {leaf.dtype for leaf in jax.tree.leaves((state.params, state.opt_state[0].mu))} == {
            jnp.dtype("bfloat16")
        }
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


@pytest.mark.parametrize("remat", list(REMAT))
def test_recomputed_layers_under_scan_take_the_same_step(remat) -> None:
    kept, wanted = scanned()
    _, recomputed, found = run(BATCHES[:2], tx=optax.sgd(0.1), remat=remat, scan_layers=True)
    assert found == pytest.approx(wanted, rel=1e-6)
    assert largest_difference(recomputed.params, kept) < 1e-6


def test_a_policy_that_keeps_attention_does_not_run_it_again() -> None:
    def attention_loops(remat: str) -> int:
        config = DecoderConfig.from_hf(CONFIGS["llama"]().to_dict() | {"num_hidden_layers": 1})
        model = Decoder(config, rngs=nnx.Rngs(0), implementation="chunked", remat=remat)
        train_step = make_train_step(model, optax.sgd(0.1))
        state = train_step.init()
        return str(jax.make_jaxpr(lambda params: train_step.accumulate(state, None, rows(1)))(0)).count("while[")

    assert attention_loops("attention") < attention_loops("full")
    with pytest.raises(
        PackingError, match="remat is 'some': pass True, False or one of none, selective, full, offload"
    ):
        decoder(remat="some")


def test_the_selective_level_keeps_narrow_products_and_no_wide_ones() -> None:
    def kept(columns: int, batch: tuple[int, ...] = ()) -> bool:
        x, weight = jnp.zeros((2, 3, 8)), jnp.zeros((8, columns) if not batch else (2, 8, columns))
        dimensions = ((2,), (0 if not batch else 1,)), (batch, batch)
        found: bool = REMAT["selective"](jax.lax.dot_general_p, x, weight, dimension_numbers=dimensions)
        return found

    assert [kept(columns) for columns in (8, 16, 17)] == [True, True, False]
    assert not kept(8, batch=(0,)), "scores of attention"


def test_the_inputs_of_offloaded_layers_wait_on_the_host() -> None:
    def traced(remat: str) -> str:
        train_step = make_train_step(decoder(remat=remat), optax.sgd(0.1))
        state = train_step.init()
        return str(jax.make_jaxpr(lambda params: train_step.accumulate(state, None, rows(1)))(0))

    assert "Host" in traced("offload") and "Host" not in traced("full")


def test_a_step_in_which_nothing_is_trained_moves_nothing() -> None:
    nothing = BATCHES[0] | {"loss_weights": np.zeros_like(BATCHES[0]["loss_weights"])}
    train_step, state, losses = run([nothing], train_step=plain_step())
    assert losses == [0.0]
    assert largest_difference(state.params, train_step.init().params) == 0.0


def test_a_batch_that_lacks_a_key_or_mixes_shapes_is_refused() -> None:
    train_step = plain_step()
    with pytest.raises(LayoutError, match="the batch lacks targets: jax_backend.to_batch makes all of them"):
        train_step.place({name: array for name, array in BATCHES[0].items() if name != "targets"})
    with pytest.raises(LayoutError, match=r"must share one shape \[A, B, S\] or \[B, S\]"):
        train_step.place(BATCHES[0] | {"targets": BATCHES[0]["targets"][:4]})


class SwapsInputs(nnx.Module):
    def __call__(self, input_ids, position_ids, segment_ids):
        raise AssertionError("never called")


class BeginsWithPositions(nnx.Module):
    def __call__(self, positions, tokens, segments):
        raise AssertionError("never called")


class TakesMask(nnx.Module):
    def __call__(self, input_ids, attention_mask, position_ids):
        raise AssertionError("never called")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (SwapsInputs, "SwapsInputs takes .* so position_ids would receive segment_ids: rename it, or pass a loss_fn"),
        (BeginsWithPositions, "so positions would receive input_ids: rename it"),
        (TakesMask, "so attention_mask would receive segment_ids"),
    ],
)
def test_a_model_whose_parameters_are_named_for_something_else_is_refused(model, message) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        causal_lm_loss(model(), rows(1))
    with pytest.raises(UnsupportedModelError, match=message):
        audit(model())


@pytest.mark.parametrize("tx", [optax.MultiSteps(optax.sgd(1.0), 2), optax.sgd(1.0)])
def test_an_optimizer_that_takes_means_of_steps_is_warned_of(tx, caplog) -> None:
    for given in (tx, tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx):
        caplog.clear()
        check_optimizer(given)
        assert ("optax.MultiSteps takes the mean" in caplog.text) == isinstance(tx, optax.MultiSteps)


def test_rows_that_do_not_divide_over_the_devices_are_refused() -> None:
    train_step = make_train_step(decoder(), optax.sgd(0.1), jax.make_mesh((8,), ("data",)))
    with pytest.raises(LayoutError, match="6 rows do not divide over 8 devices: take a multiple of 8"):
        train_step.place({name: array[:6] for name, array in BATCHES[0].items()})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt-oss", "qwen3.5"])
def test_many_steps_follow_torch_on_each_document_alone(name, tmp_path) -> None:
    model = saved(name, tmp_path)
    batches = [documents(12, seed=seed) for seed in range(15)]

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    wanted = []
    for sequences in batches:
        total, count = torch.zeros(()), 0
        for ids in sequences:
            tokens = torch.from_numpy(ids.astype(np.int64))[None]
            logits = model(tokens, use_cache=False).logits
            total = total + torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="sum")
            count += len(ids) - 1
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        wanted.append(float(total.detach() / count))

    tx = optax.adamw(3e-3, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01)
    train_step = make_train_step(weights.load(tmp_path, implementation="xla"), tx)
    state, found = train_step.init(), []
    for sequences in batches:
        packed = to_batch(packing_core.pack(sequences, 48))
        fixed = {name: np.pad(array, ((0, 8 - len(array)), (0, 0))) for name, array in packed.items()}
        state, metrics = train_step(state, fixed)
        found.append(float(metrics["loss"]))
    assert np.abs(np.array(found) - wanted).max() < 1e-4
    assert wanted[-1] < wanted[0] - 0.05
    assert train_step.compilations == 1


@pytest.mark.parametrize("precision", [None, "highest"])
def test_precision_is_that_of_every_matrix_product(precision):
    """Without it, dense attention alone asks for a precision."""
    train_step = make_train_step(decoder(), optax.sgd(0.1), precision=precision)
    state, batch = train_step.init(), rows(1)
    traced = str(jax.make_jaxpr(lambda params, batch: train_step.accumulate(state, None, batch))(state.params, batch))
    products, highest = traced.count("dot_general["), traced.count("precision=(Precision.HIGHEST")
    assert products > 10
    assert (highest == products) == (precision == "highest")
