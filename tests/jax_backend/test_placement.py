"""Weights are made, read and kept in shards: no device ever holds more than its part, in one process or in several."""

from __future__ import annotations

import gc
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jax_backend.model import weights
from jax_backend.model.decoder import Decoder, DecoderConfig
from jax_backend.training.train_step import make_train_step
from packing_core.errors import PackingError
from tests.jax_backend.models import CONFIGS, saved
from tests.jax_backend.processes import run_processes
from tests.jax_backend.test_train_step import BATCHES, largest_difference, one_device, plain_step

WIDE = CONFIGS["llama"]().to_dict() | {"num_hidden_layers": 1, "vocab_size": 512}


def decoder() -> Decoder:
    return Decoder(DecoderConfig.from_hf(WIDE), rngs=nnx.Rngs(0), implementation="xla")


def bytes_of(*, device: int) -> int:
    """Counts the bytes of live arrays on one device."""
    gc.collect()
    here = (x for x in jax.live_arrays() if device in {d.id for d in x.sharding.device_set})
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in here)


def weight_bytes() -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(nnx.eval_shape(decoder))))


@pytest.mark.slow
@pytest.mark.parametrize("source", ["function", "folder"])
def test_no_device_holds_more_than_its_shard_of_weights_and_optimizer(source, tmp_path) -> None:
    mesh = jax.make_mesh((4,), ("fsdp",))
    if source == "folder":
        weights.save(decoder(), tmp_path)
    before = [bytes_of(device=device) for device in range(4)]
    if source == "function":
        train_step = make_train_step(decoder, optax.adam(1e-2), mesh)
        state = train_step.init()
    else:
        train_step = make_train_step(weights.load(tmp_path, mesh=mesh, implementation="xla"), optax.adam(1e-2), mesh)
        state = train_step.init(donate=True)
    kept = [bytes_of(device=device) - before[device] for device in range(4)]
    shard = 3 * weight_bytes() / 4  # weights and Adam's two moments
    assert max(kept) <= 1.15 * shard and min(kept) >= 0.9 * shard
    fresh = make_train_step(decoder(), optax.adam(1e-2)).init()
    assert largest_difference(state.params, fresh.params) < 1e-6


def test_each_device_reads_only_its_part_of_a_checkpoint(tmp_path, monkeypatch) -> None:
    weights.save(decoder(), tmp_path)
    read: list[int] = []

    class Counted:
        def __init__(self, part) -> None:
            self.part = part
            self.get_shape = part.get_shape

        def __getitem__(self, index):
            found = self.part[index]
            read.append(found.nbytes)
            return found

    opened = weights._open
    monkeypatch.setattr(weights, "_open", lambda folder: {n: Counted(part) for n, part in opened(folder).items()})
    weights.load(tmp_path, mesh=jax.make_mesh((4,), ("fsdp",)))
    assert sum(read) <= 1.01 * weight_bytes()
    assert max(read) <= max(x.nbytes for x in load_file(tmp_path / "model.safetensors").values()) / 4


def test_a_model_stays_usable_unless_it_is_donated() -> None:
    model, batch = decoder(), BATCHES[0]
    embedding = model.model.embed_tokens.embedding
    train_step = make_train_step(model, optax.sgd(0.1))
    train_step(train_step.init(), batch)
    train_step(train_step.init(), batch)  # init again starts from the same weights
    assert not embedding[...].is_deleted()
    train_step(train_step.init(donate=True), batch)
    assert embedding[...].is_deleted()
    with pytest.raises(PackingError, match="gave the model's weights away: build a new step from a new model"):
        train_step.init()


def test_bfloat16_checkpoints_are_cast_while_they_are_read(tmp_path) -> None:
    reference = saved("qwen2-window-tied", tmp_path).bfloat16()
    reference.save_pretrained(tmp_path)
    model = weights.load(tmp_path, mesh=jax.make_mesh((2,), ("fsdp",)), param_dtype=jnp.float32)
    kernel = model.model.layers[1].mlp.down_proj.kernel[...]
    assert kernel.dtype == jnp.float32 and kernel.addressable_shards[0].data.size * 2 == kernel.size
    wanted = reference.model.layers[1].mlp.down_proj.weight.detach().float().numpy().T
    np.testing.assert_array_equal(kernel, wanted)


@pytest.mark.slow
def test_two_processes_train_on_rows_of_their_own_as_one_process_on_all_rows(tmp_path) -> None:
    weights.save(plain_step().model(plain_step().init()), tmp_path / "start")
    cut = {name: np.stack([b[name] for b in BATCHES]).reshape(len(BATCHES), 2, 4, -1) for name in BATCHES[0]}
    np.savez(tmp_path / "rows.npz", **cut)
    run_processes("process_of_two.py", str(tmp_path))
    params, losses = one_device()
    assert json.loads((tmp_path / "losses.json").read_text()) == pytest.approx(losses, rel=1e-6)
    found, wanted = load_file(tmp_path / "end" / "model.safetensors"), weights.export(params)
    assert found.keys() == wanted.keys()
    assert np.max([np.abs(found[name] - wanted[name]).max() for name in wanted]) < 1e-6
