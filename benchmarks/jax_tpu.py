"""Runs the conformance suite on a TPU, and measures attention and the training step there.

    python -m benchmarks.jax_tpu
    python -m benchmarks.jax_tpu --only attention step --output results
    python -m benchmarks.jax_tpu --toy                        # tiny shapes, to see that it runs

It stops each section at its limit, about five minutes in all, and prints results as they come. The suite's table
stands at its end. ``tpu`` is splash attention, and ``chunked`` plain XLA operations.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.jax_gpu import run

# The seconds of a section, and its command.
SECTIONS = {
    "gate": (150.0, ("pytest", "conformance", "-v", "--backend", "jax:tpu", "--backend", "jax:chunked")),
    "attention": (90.0, ("benchmarks.jax_attention", "--match", "ours, (tpu|chunked)", "--seconds", "80")),
    "step": (90.0, ("benchmarks.jax_step", "--match", "scanned, products", "--seconds", "80")),
}
TOY_GATE = ("--requirement", "ISO-01")


def command(name: str, output: Path | None, toy: bool) -> list[str]:
    """Returns the command of a section."""
    _, wanted = SECTIONS[name]
    if name == "gate":
        given = [*TOY_GATE * toy, *(("--report", str(output / "gate.json")) if output else ())]
    else:
        given = [*["--toy"] * toy, *(("--output", str(output / f"{name}.json")) if output else ())]
    return [sys.executable, "-m", *wanted, *given]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="these sections")
    parser.add_argument("--output", type=Path, help="folder for the files of JSON")
    parser.add_argument("--toy", action="store_true", help="tiny shapes; only to see that everything runs")
    options = parser.parse_args(arguments)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
    ended = [
        run(name, command(name, options.output, options.toy), SECTIONS[name][0], dict(os.environ))
        for name in options.only
    ]
    return int(not all(ended))


if __name__ == "__main__":
    sys.exit(main())
