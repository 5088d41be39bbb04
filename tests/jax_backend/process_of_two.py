"""One process of a job: loads a folder into shards over all processes, trains on rows of its own, and saves.

Arguments: the coordinator's address, the number of processes, this one's number, and a folder that holds ``start`` (a
checkpoint) and ``rows.npz`` (arrays [steps, processes, rows, tokens]). Process 0 writes ``losses.json``; ``end`` is the
trained checkpoint.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np
import optax

from jax_backend.model import weights
from jax_backend.training.train_step import make_train_step


def main(address: str, count: str, number: str, folder: Path) -> None:
    jax.distributed.initialize(address, int(count), int(number))
    mesh = jax.make_mesh((2, 2), ("data", "fsdp"))
    model = weights.load(folder / "start", mesh=mesh, implementation="xla")
    kernel = model.model.layers[0].mlp.up_proj.kernel[...]
    assert kernel.addressable_shards[0].data.size * 2 == kernel.size
    train_step = make_train_step(model, optax.sgd(0.1), mesh)
    state, losses = train_step.init(donate=True), []
    with np.load(folder / "rows.npz") as rows:
        arrays = dict(rows)
    for step in range(len(arrays["input_ids"])):
        state, metrics = train_step(state, {name: array[step, int(number)] for name, array in arrays.items()})
        losses.append(float(metrics["loss"]))
    weights.save(train_step.model(state), folder / "end")
    if not int(number):
        (folder / "losses.json").write_text(json.dumps(losses))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:4], Path(sys.argv[4]))
