"""Everything about speed and memory in JAX on NVIDIA GPUs, each section a process of under 150 seconds.

    python -m benchmarks.jax_gpu --output results             # the sections for one GPU
    python -m benchmarks.jax_gpu --only step cudnn --output results
    python -m benchmarks.jax_gpu --devices 2 --output results # the sections for two GPUs
    python -m benchmarks.jax_gpu --list                       # what each section runs
    python -m benchmarks.jax_gpu --toy                        # tiny shapes, to see that it runs

A section prints its figures as they come and writes them to ``NAME.json`` in the output folder. The command of each
takes further options (contenders, sets, ways): see its module.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LIMIT = 150.0  # seconds of a section


@dataclass(frozen=True)
class Section:
    """A benchmark's module, its arguments, and the number of GPUs it needs."""

    module: str
    arguments: tuple[str, ...] = ()
    devices: int = 1


SECTIONS = {
    "step": Section("jax_step", ("--match", "scanned")),
    "unrolled": Section("jax_step", ("--match", "one by one")),
    # What containing NaN costs attention (a ratio for each set) and a step (tokens/s of both ways).
    "contain": Section("jax_attention", ("--group", "cudnn", "--match", "pallas$")),
    "contain-step": Section("jax_step", ("--match", "^scanned$|contained")),
    "cudnn": Section("jax_attention", ("--group", "cudnn", "--match", "ours, pallas|packed offsets")),
    # would Mosaic GPU's kernels win where Triton's are taken?
    "mosaic": Section("jax_attention", ("--group", "torch", "--match", "ours, pallas", "--lowering", "mosaic")),
    "attention": Section("jax_attention"),
    "compile": Section("jax_step", ("--compile",)),
    "devices": Section("jax_step", ("--match", "scanned, products", "--devices", "2"), devices=2),
}


def command(name: str, output: Path | None, toy: bool) -> list[str]:
    section = SECTIONS[name]
    options = ["--toy"] * toy + (["--output", str(output / f"{name}.json")] if output else [])
    return [sys.executable, "-m", f"benchmarks.{section.module}", *section.arguments, *options]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), help="these sections")
    parser.add_argument("--devices", type=int, choices=[1, 2], default=1, help="the sections for so many GPUs")
    parser.add_argument("--output", type=Path, help="folder for the files of JSON")
    parser.add_argument("--list", action="store_true", help="print each section's command and stop")
    parser.add_argument("--toy", action="store_true", help="tiny shapes; only to see that everything runs")
    options = parser.parse_args(arguments)
    chosen = options.only or [name for name, section in SECTIONS.items() if section.devices == options.devices]
    for name in chosen:
        wanted = command(name, options.output, options.toy)
        print(f"== {name}: {' '.join(wanted)}", flush=True)
        if not options.list:
            run(name, wanted, LIMIT, _environment(SECTIONS[name], options.toy))


def run(name: str, wanted: Sequence[str], limit: float, environment: dict[str, str]) -> bool:
    """Runs a section's command for at most ``limit`` seconds, prints how it ended, and returns whether it succeeded."""
    begin, succeeded = time.perf_counter(), False
    try:
        status = subprocess.run(wanted, env=environment, timeout=limit, check=False).returncode
        succeeded, outcome = status == 0, "ended" if status == 0 else f"failed with status {status}"
    except subprocess.TimeoutExpired:
        outcome = f"stopped after {limit:.0f} s"
    print(f"== {name}: {outcome}, {time.perf_counter() - begin:.0f} s", flush=True)
    return succeeded


def _environment(section: Section, toy: bool) -> dict[str, str]:
    if not toy:
        return dict(os.environ)
    flags = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={section.devices}"
    return os.environ | {"XLA_FLAGS": flags}


if __name__ == "__main__":
    main()
