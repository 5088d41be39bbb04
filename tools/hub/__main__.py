"""``python -m tools.hub OUT`` writes the package of the Kernels Hub into a folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.hub.package import BACKENDS, write

if __name__ == "__main__":
    options = argparse.ArgumentParser(prog="python -m tools.hub", description="Write the Kernels Hub package.")
    options.add_argument("out", type=Path, help="a new or empty folder")
    options.add_argument("--backend", action="append", choices=["cuda", "rocm", "xpu", "cpu"], help="default: cuda")
    chosen = options.parse_args()
    print(write(chosen.out, chosen.backend or BACKENDS))
