"""Compares the flax decoder with transformers, family by family: logits, loss and gradients of packed rows here, of
each document alone there, float32 on the CPU.

    python -m benchmarks.jax_parity                    # every family, under two minutes on 16 cores
    python -m benchmarks.jax_parity --match "gemma|olmo"

Tiny models with random weights, those of ``tests/jax_backend/models.py``, written by transformers and read by
``jax_backend.load``. An error is the largest difference over the largest value.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from benchmarks._report import machine, table, versions, write_json
from jax_backend import load, packed_cross_entropy, to_batch
from jax_backend.model import weights
from tests.jax_backend.models import CONFIGS, documents, on_disk, packed, saved


def error(found: Any, wanted: Any) -> float:
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def compare(family: str) -> dict[str, float]:
    """The errors of logits, loss and gradients."""
    with tempfile.TemporaryDirectory() as folder:
        reference = saved(family, Path(folder))
        model = load(folder)
    rows = packed()
    batch = {name: jnp.asarray(array) for name, array in to_batch(rows).items()}

    def mean_loss(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        logits = model(batch["input_ids"], batch["segment_ids"], batch["position_ids"])
        total, weight = packed_cross_entropy(logits, batch["targets"], weights=batch["loss_weights"])
        return total / weight, logits

    (loss, logits), gradients = nnx.jit(nnx.value_and_grad(mean_loss, has_aux=True))(model, batch)
    wanted_logits, wanted_loss, count = [], torch.zeros(()), 0
    for ids in documents(9):
        tokens = torch.from_numpy(ids.astype(np.int64))[None]
        # dynamic NTK keeps the frequencies of the longest document so far
        reference.model.rotary_emb = type(reference.model.rotary_emb)(reference.model.config)
        out = reference(tokens, use_cache=False).logits[0]
        wanted_logits.append(out.detach().numpy())
        wanted_loss = wanted_loss + torch.nn.functional.cross_entropy(out[:-1], tokens[0, 1:], reduction="sum")
        count += len(ids) - 1
    (wanted_loss / count).backward()
    places = zip(rows.sources, rows.rows, rows.segment_starts, rows.lengths, strict=True)
    found = weights.export(gradients)
    wanted = on_disk(reference, {name: parameter.grad for name, parameter in reference.named_parameters()})
    return {
        "logits": max(error(logits[row, start : start + n], wanted_logits[which]) for which, row, start, n in places),
        "loss": error(loss, wanted_loss.detach() / count),
        "gradients": max(error(found[name], gradient) for name, gradient in wanted.items()),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    begin = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="", metavar="PATTERN", help="families whose name it matches")
    parser.add_argument("--output", type=Path, help="file of JSON, rewritten after each family")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    header = [machine(), versions("jax", "jaxlib", "flax", "torch", "transformers")]
    print("\n".join(header), flush=True)
    found: dict[str, dict[str, float]] = {}
    for family in filter(re.compile(options.match).search, CONFIGS):
        found[family] = compare(family)
        print(family, found[family], flush=True)
        write_json(options.output, {"header": header, "errors": found}, begin)
    columns = ["logits", "loss", "gradients"]
    print(table(["family", *columns], [[name, *(f"{x[c]:.1e}" for c in columns)] for name, x in found.items()]))


if __name__ == "__main__":
    main()
