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
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

LIMIT = 150.0  # seconds of a section
CHECKPOINT = "{checkpoint}"


@dataclass(frozen=True)
class Section:
    """A benchmark's module, its arguments, and the number of GPUs it needs."""

    module: str
    arguments: tuple[str, ...] = ()
    devices: int = 1
    environment: dict[str, str] = field(default_factory=dict)


SECTIONS = {
    "step": Section("jax_step", ("--match", "scanned")),
    "unrolled": Section("jax_step", ("--match", "one by one")),
    "cudnn": Section("jax_attention", ("--group", "cudnn", "--match", "ours, pallas|packed offsets")),
    "torch": Section("jax_attention", ("--group", "torch", "--match", "ours, pallas", "--torch")),
    # beside "torch": would Mosaic GPU's kernels win where they are not taken?
    "mosaic": Section("jax_attention", ("--group", "torch", "--match", "ours, pallas", "--lowering", "mosaic")),
    "attention": Section("jax_attention"),
    "compile": Section("jax_step", ("--compile",)),
    # CUDA graphs would hide which operation a kernel belongs to
    "profile": Section(
        "jax_step",
        ("--profile", "scanned, products and attention kept"),
        environment={"XLA_FLAGS": "--xla_gpu_enable_command_buffer="},
    ),
    "scan": Section("jax_scan"),
    "devices": Section("jax_step", ("--match", "scanned, products", "--devices", "2"), devices=2),
    "init": Section("jax_large", ("--phase", "init"), devices=2),
    "save": Section("jax_large", ("--phase", "save", "--folder", CHECKPOINT), devices=2),
    "load": Section("jax_large", ("--phase", "load", "--folder", CHECKPOINT), devices=2),
}


def command(name: str, checkpoint: Path, output: Path | None, toy: bool) -> list[str]:
    section = SECTIONS[name]
    given = [str(checkpoint) if argument == CHECKPOINT else argument for argument in section.arguments]
    given += ["--toy"] * toy + (["--output", str(output / f"{name}.json")] if output else [])
    return [sys.executable, "-m", f"benchmarks.{section.module}", *given]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), help="these sections")
    parser.add_argument("--devices", type=int, choices=[1, 2], default=1, help="the sections for so many GPUs")
    parser.add_argument("--output", type=Path, help="folder for the files of JSON")
    parser.add_argument("--checkpoint", type=Path, help="folder for the weights of 8B parameters (16 GB)")
    parser.add_argument("--list", action="store_true", help="print each section's command and stop")
    parser.add_argument("--toy", action="store_true", help="tiny shapes; only to see that everything runs")
    options = parser.parse_args(arguments)
    chosen = options.only or [name for name, section in SECTIONS.items() if section.devices == options.devices]
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            wanted = command(name, options.checkpoint or Path(folder), options.output, options.toy)
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
    environment = os.environ | section.environment
    if toy:
        flags = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={section.devices}"
        environment |= {"XLA_FLAGS": flags}
    return environment


if __name__ == "__main__":
    main()
