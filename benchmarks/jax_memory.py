"""Compile time and memory of the JAX train step, without running it: layers scanned or not, logits whole or in chunks.

    python -m benchmarks.jax_memory                  # 24 tiny layers, and a vocabulary of 151,936; any machine
    python -m benchmarks.jax_memory --devices 4      # also what each device holds of weights and optimizer

Memory is what XLA plans for temporaries (``memory_analysis``); nothing of that size is allocated.
"""

from __future__ import annotations

import argparse
import os
import time

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--devices", type=int, default=1, help="fake CPU devices to shard weights over")
parser.add_argument("--layers", type=int, default=24)
parser.add_argument("--tokens", type=int, default=16_384, help="tokens of the row whose logits are counted")
arguments = parser.parse_args()
if arguments.devices > 1:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={arguments.devices}"

import jax  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

from benchmarks._report import machine  # noqa: E402
from benchmarks.jax_step import QWEN, TOY  # noqa: E402
from jax_backend import make_train_step, packed_cross_entropy  # noqa: E402
from jax_backend.model.decoder import Decoder, DecoderConfig  # noqa: E402


def compile_seconds(**options: object) -> float:
    """Measures the step of so many tiny layers on one row of 256 tokens."""
    config = DecoderConfig.from_hf(TOY | {"num_hidden_layers": arguments.layers})
    step = make_train_step(lambda: Decoder(config, rngs=nnx.Rngs(0), **options), optax.adamw(1e-4))
    begin = time.perf_counter()
    step.compile(rows=1, tokens=256)
    return time.perf_counter() - begin


def whole_logits(model: Decoder, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    logits = model(batch["input_ids"], batch["segment_ids"], batch["position_ids"])
    return packed_cross_entropy(logits, batch["targets"], weights=batch["loss_weights"])


def temporaries(loss_fn: object) -> int:
    """Bytes of a step of one tiny layer under a head of the whole vocabulary."""
    config = DecoderConfig.from_hf(TOY | {"num_hidden_layers": 1, "vocab_size": QWEN["vocab_size"]})
    step = make_train_step(lambda: Decoder(config, rngs=nnx.Rngs(0)), optax.sgd(1e-4), loss_fn=loss_fn)
    return step.compile(rows=1, tokens=arguments.tokens).memory_analysis().temp_size_in_bytes


def shares() -> list[float]:
    """Bytes of weights and optimizer on each device after ``init``, over those of one device's even share."""
    mesh = jax.make_mesh((arguments.devices,), ("fsdp",))
    config = DecoderConfig.from_hf(TOY | {"hidden_size": 256, "intermediate_size": 1024})
    state = make_train_step(lambda: Decoder(config, rngs=nnx.Rngs(0)), optax.adamw(1e-4), mesh).init()
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    held = dict.fromkeys(jax.devices(), 0)
    for array in jax.live_arrays():
        for device in array.sharding.device_set:
            size = int(array.nbytes / array.size * max(1, _size(array.sharding.shard_shape(array.shape))))
            held[device] += size
    return [size / (whole / arguments.devices) for size in held.values()]


def _size(shape: tuple[int, ...]) -> int:
    product = 1
    for side in shape:
        product *= side
    return product


def main() -> None:
    print(machine())
    for name, options in (("in a loop", {}), ("scanned", {"scan_layers": True})):
        for remat in (False, "full"):
            seconds = compile_seconds(**options, remat=remat)
            print(f"{arguments.layers} layers {name}, remat={remat}: compiled in {seconds:.1f} s", flush=True)
    logits = arguments.tokens * QWEN["vocab_size"] * 4
    for name, loss_fn in (("whole logits", whole_logits), ("chunks of logits", None)):
        found = temporaries(loss_fn)
        print(f"{name}: temporaries {found / 2**30:.2f} GiB, {found / logits:.2f} of the float32 logits", flush=True)
    if arguments.devices > 1:
        held = ", ".join(f"{share:.2f}" for share in shares())
        print(f"fsdp over {arguments.devices} devices: each holds {held} of its even share after init")


if __name__ == "__main__":
    main()
