"""Everything about speed and memory in JAX, each section a process of its own under a time limit.

    python -m benchmarks.jax_gpu --output results             # the sections for one GPU
    python -m benchmarks.jax_gpu --only step cudnn --output results
    python -m benchmarks.jax_gpu --devices 2 --output results # the sections for two GPUs
    python -m benchmarks.jax_gpu --devices tpu                # the conformance suite on a TPU, and speeds there
    python -m benchmarks.jax_gpu --list                       # what each section runs
    python -m benchmarks.jax_gpu --tiny                       # tiny shapes, to see that it runs

A section prints its figures as they come and writes them to a folder of its name in the output folder. The command of
each takes further options (contenders, sets, ways): see its module. The sections for a TPU take about five minutes;
``tpu`` is splash attention, and ``chunked`` plain XLA operations.
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


@dataclass(frozen=True)
class Section:
    """A module, its arguments, what devices it needs, and its limit in seconds."""

    module: str
    arguments: tuple[str, ...] = ()
    devices: str = "1"
    limit: float = 150.0


STEP, ATTENTION = "benchmarks.jax_step", "benchmarks.jax_attention"
SECTIONS = {
    "step": Section(STEP, ("--match", "scanned")),
    "unrolled": Section(STEP, ("--match", "one by one")),
    # What containing NaN costs attention (a ratio for each set) and a step (tokens/s of both ways).
    "contain": Section(ATTENTION, ("--match", "pallas$")),
    "contain-step": Section(STEP, ("--match", "^scanned$|contained")),
    "cudnn": Section(ATTENTION, ("--match", "ours, pallas|packed offsets")),
    "attention": Section(ATTENTION, ("--sets", "8k lognormal", "8k, 8 x 1,024")),
    "devices": Section(STEP, ("--match", "scanned, products", "--devices", "2"), "2"),
    # A budget does not end a compilation, and those for a TPU are long: it leaves them a minute.
    "gate": Section("pytest", ("conformance", "-v", "--backend", "jax:tpu", "--backend", "jax:chunked"), "tpu"),
    "attention on TPU": Section(
        ATTENTION, ("--sets", "8k lognormal", "8k, one", "--match", "ours, (tpu|chunked)", "--budget", "80"), "tpu"
    ),
    "step on TPU": Section(STEP, ("--match", "scanned, products", "--budget", "80"), "tpu"),
}


def command(name: str, output: Path | None, tiny: bool) -> list[str]:
    """Returns the command of a section."""
    section = SECTIONS[name]
    if section.module == "pytest":
        options = ["--requirement", "ISO-01"] * tiny + (["--report", str(output / "gate.json")] if output else [])
    else:
        # so that it ends by itself and reports what it has
        budget = [] if "--budget" in section.arguments else ["--budget", f"{section.limit - 30:.0f}"]
        options = [*budget, *["--tiny"] * tiny, *(["--output", str(output / name)] if output else [])]
    return [sys.executable, "-m", section.module, *section.arguments, *options]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), help="these sections")
    parser.add_argument("--devices", choices=["1", "2", "tpu"], default="1", help="the sections for these")
    parser.add_argument("--output", type=Path, help="folder for the files of JSON")
    parser.add_argument("--list", action="store_true", help="print each section's command and stop")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes; only to see that everything runs")
    chosen, failed = parser.parse_args(arguments), 0
    for name in chosen.only or [name for name, section in SECTIONS.items() if section.devices == chosen.devices]:
        wanted = command(name, chosen.output, chosen.tiny)
        print(f"== {name}: {' '.join(wanted)}", flush=True)
        failed += not (chosen.list or run(name, wanted, tiny=chosen.tiny))
    return int(failed > 0)


def run(name: str, wanted: Sequence[str], *, tiny: bool) -> bool:
    """Runs a section's command within its limit, prints how it ended, and returns whether it succeeded."""
    section, begin, environment = SECTIONS[name], time.perf_counter(), dict(os.environ)
    if tiny and section.devices == "2":
        environment["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    try:
        status = subprocess.run(wanted, env=environment, timeout=section.limit, check=False).returncode
        outcome = "ended" if status == 0 else f"failed with status {status}"
    except subprocess.TimeoutExpired:
        outcome = f"stopped after {section.limit:.0f} s"
    print(f"== {name}: {outcome}, {time.perf_counter() - begin:.0f} s", flush=True)
    return outcome == "ended"


if __name__ == "__main__":
    sys.exit(main())
