"""Checkpoints of the JAX step: resumed to the bit, on other meshes and with other stacks of layers, or refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_backend.model import weights
from jax_backend.model.decoder import Decoder, DecoderConfig
from jax_backend.training.checkpoint import restore_state, save_state
from jax_backend.training.train_step import TrainStep, make_train_step
from packing_core.errors import PackingError
from tests.jax_backend.models import CONFIGS
from tests.jax_backend.test_train_step import BATCHES, decoder, largest_difference, plain_step, run


@pytest.mark.parametrize("mesh_shape", [None, pytest.param((2, 4), marks=pytest.mark.slow)], ids=str)
def test_a_resumed_run_goes_on_to_the_bit(tmp_path, mesh_shape) -> None:
    mesh = None if mesh_shape is None else jax.make_mesh(mesh_shape, ("data", "fsdp"))
    train_step, state, _ = run(BATCHES[:2], mesh)
    save_state(tmp_path / "two", state)
    straight, straight_metrics = train_step(state, BATCHES[2])

    fresh = make_train_step(decoder(), optax.adamw(1e-2), mesh)
    restored = restore_state(tmp_path / "two", fresh)
    assert int(restored.step) == 2
    resumed, metrics = fresh(restored, BATCHES[2])
    assert float(metrics["loss"]) == float(straight_metrics["loss"])
    assert largest_difference(resumed, straight) == 0.0


def test_a_checkpoint_of_one_device_goes_on_over_eight(tmp_path) -> None:
    _, state, _ = run(BATCHES[:1], train_step=plain_step())
    save_state(tmp_path / "one", state)
    spread = make_train_step(decoder(), optax.sgd(0.1), jax.make_mesh((8,), ("fsdp",)))
    restored = restore_state(tmp_path / "one", spread)
    assert largest_difference(restored.params, state.params) == 0.0
    embedding = restored.params["model"]["embed_tokens"]["embedding"][...]
    assert embedding.addressable_shards[0].data.size * 8 == embedding.size


@pytest.mark.parametrize(("before", "after", "mesh"), [(True, False, None), (False, True, {"fsdp": 2})], ids=str)
def test_a_checkpoint_goes_on_whether_layers_are_scanned_or_not(before, after, mesh, tmp_path) -> None:
    windows = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]  # two stacks, and a layer after them
    fields = {"num_hidden_layers": 5, "layer_types": windows}
    config = DecoderConfig.from_hf(CONFIGS["qwen2-window-tied"]().to_dict() | fields)

    def step(scan_layers: bool, mesh: jax.sharding.Mesh | None = None) -> TrainStep:
        model = Decoder(config, rngs=nnx.Rngs(0), implementation="xla", scan_layers=scan_layers)
        noise = optax.add_noise(1e-9, 0.5, key=jax.random.key(7))
        return make_train_step(model, optax.chain(optax.adam(1e-2), noise), mesh)

    def drawn(x: jax.Array) -> jax.Array:
        return jnp.asarray(rng.standard_normal(x.shape), x.dtype) if x.dtype == jnp.float32 else x

    rng = np.random.default_rng(0)
    state = jax.tree.map(drawn, step(before).init())
    save_state(tmp_path / "saved", state)
    other = step(after, mesh and jax.make_mesh(tuple(mesh.values()), tuple(mesh)))
    restored = restore_state(tmp_path / "saved", other)
    assert jax.tree.map(jnp.shape, restored) == jax.tree.map(jnp.shape, other.shapes)
    moments = [(x.params, x.opt_state[0][0].mu, x.opt_state[0][0].nu) for x in (state, restored)]
    for there, here in zip(*(map(weights.export, trees) for trees in moments), strict=True):
        assert all(np.array_equal(there[name], here[name]) for name in there | here)
    assert restored.opt_state[1].rng_key == state.opt_state[1].rng_key


def test_checkpoint_folders_that_do_not_fit_say_so(tmp_path) -> None:
    train_step = plain_step()
    with pytest.raises(PackingError, match="holds no checkpoint: save_state writes one"):
        restore_state(tmp_path / "nowhere", train_step)
    with pytest.raises(PackingError, match="exists: give every checkpoint a folder of its own"):
        save_state(tmp_path, train_step.init())


def test_a_checkpoint_of_another_model_or_optimizer_is_refused(tmp_path) -> None:
    save_state(tmp_path / "saved", plain_step().init())
    given = CONFIGS["llama"]().to_dict()
    changed = [DecoderConfig.from_hf(given | {name: 2 * given[name]}) for name in ("hidden_size", "num_hidden_layers")]
    others = [make_train_step(Decoder(config, rngs=nnx.Rngs(0)), optax.sgd(0.1)) for config in changed]
    wide, deep = others
    refused = {
        r"lm_head.kernel.value: \(32, 64\) there and \(64, 64\) here": wide,
        r"layers.1.input_layernorm.weight.value: missing there and \(32,\) here": deep,
        r"opt_state.0.count: missing there and \(\) here": make_train_step(decoder(), optax.adamw(0.1)),
    }
    for message, other in refused.items():
        with pytest.raises(PackingError, match=rf"saved is no checkpoint of this model and optimizer \(.*{message}"):
            restore_state(tmp_path / "saved", other)
    (tmp_path / "empty").mkdir()
    with pytest.raises(PackingError, match=r"empty is no checkpoint of this model and optimizer \("):
        restore_state(tmp_path / "empty", others[0])


def test_an_optimizer_with_a_random_key_is_restored(tmp_path) -> None:
    train_step = make_train_step(decoder(), optax.add_noise(0.1, 0.1, key=jax.random.key(7)))
    save_state(tmp_path / "saved", train_step.init())
    key = restore_state(tmp_path / "saved", train_step).opt_state.rng_key
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(7)))
