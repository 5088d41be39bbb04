"""A decoder of 8B parameters over two GPUs: what each device holds at most while weights are made, or loaded.

    python -m benchmarks.jax_large --phase init       # float32 weights and AdamW's moments, made in their shards
    python -m benchmarks.jax_large --phase save --folder /tmp/8b      # a bfloat16 checkpoint of random weights
    python -m benchmarks.jax_large --phase load --folder /tmp/8b      # read into its shards

Each phase is a process, because a device's peak counts from the process's begin. The shard is what the state keeps on a
device in the end.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks._report import machine, versions, write_json
from benchmarks.jax_step import TOY
from jax_backend import load, make_train_step, save
from jax_backend.model.decoder import Decoder, DecoderConfig

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 5e5,
}


def held(tree: Any) -> dict[str, Any]:
    """Bytes of the tree's arrays on each device, the device's peak, and their quotient."""
    jax.block_until_ready(tree)
    shards = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            shards[shard.device] += shard.data.nbytes
    peaks = {device: (device.memory_stats() or {}).get("peak_bytes_in_use", float("nan")) for device in shards}
    return {
        "shard_gib": [size / 2**30 for size in shards.values()],
        "peak_gib": [peak / 2**30 for peak in peaks.values()],
        "peak_over_shard": [peaks[device] / size if size else float("nan") for device, size in shards.items()],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    begin = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phase", choices=["init", "save", "load"], required=True)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is")
    parser.add_argument("--layers", type=int, default=32, help="fewer than 32: a smaller model")
    parser.add_argument("--loop", action="store_true", help="layers one by one, not scanned")
    parser.add_argument("--output", type=Path, help="file of JSON")
    parser.add_argument("--toy", action="store_true", help="tiny shapes; only to see that everything runs")
    options = parser.parse_args(arguments)
    if options.phase != "init" and options.folder is None:
        parser.error("--folder says where the checkpoint is")
    config = DecoderConfig.from_hf(
        TOY | {"model_type": "llama"} if options.toy else LLAMA | {"num_hidden_layers": options.layers}
    )
    mesh = jax.make_mesh((len(jax.devices()),), ("fsdp",))
    header = [
        f"{machine()}; {len(jax.devices())} x {jax.devices()[0].device_kind}",
        versions("jax", "jaxlib", "jax-cuda13-plugin", "flax", "optax"),
    ]
    param_dtype = jnp.float32 if options.phase == "init" else jnp.bfloat16
    kinds: dict[str, Any] = {"dtype": jnp.bfloat16, "param_dtype": param_dtype, "scan_layers": not options.loop}
    started = time.perf_counter()
    if options.phase == "load":
        state: Any = nnx.state(load(options.folder, mesh=mesh, **kinds), nnx.Param)
        found = held(state)
    else:
        tx = optax.adamw(1e-4) if options.phase == "init" else optax.sgd(1e-4)
        step = make_train_step(lambda: Decoder(config, rngs=nnx.Rngs(0), **kinds), tx, mesh)
        state = step.init()
        found = held(state)
        if options.phase == "save":
            save(step.model(state), options.folder)
    found |= {"phase": options.phase, "of_the_phase_s": time.perf_counter() - started}
    count = sum(leaf.size for leaf in jax.tree.leaves(state if options.phase == "load" else state.params))
    print("\n".join(header))
    print(f"{options.phase}, {count / 1e9:.2f}B parameters: {found}", flush=True)
    write_json(options.output, {"header": header, **found}, begin)


if __name__ == "__main__":
    main()
