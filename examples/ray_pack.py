"""Packing files on a Ray cluster: `crosspack pack --engine ray` writes the same bytes as one machine does.

Run it: RAY_ADDRESS=auto python examples/ray_pack.py    (without RAY_ADDRESS, Ray starts on this machine)
Needs: pip install 'crosspack[hf,ray]'
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory


def pack(data: Path, output: Path, *options: str) -> dict[str, bytes]:
    """Run the command; the files of rows that it wrote."""
    command = [sys.executable, "-m", "crosspack", "pack", "--quiet", "--data", str(data), "--capacity", "256"]
    done = subprocess.run([*command, "--output", str(output), *options])
    if done.returncode:  # the command has said why
        raise SystemExit(done.returncode)
    return {path.name: path.read_bytes() for path in sorted(output.glob("*.parquet"))}


with TemporaryDirectory() as folder:  # on a cluster: a folder that all of its machines see
    data = Path(folder) / "data.jsonl"
    data.write_text("\n".join(json.dumps({"text": f"Document {n}." + " packed" * (n % 90)}) for n in range(2000)))
    here = pack(data, Path(folder) / "here", "--workers", "1")
    on_ray = pack(data, Path(folder) / "ray", "--engine", "ray", "--workers", "2")
    print(f"{list(here)}: the same bytes from Ray: {here == on_ray}")
