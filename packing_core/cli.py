"""``python -m packing_core.cli`` is the console command ``crosspack``, found by its entry point."""

from __future__ import annotations

from importlib.metadata import entry_points

if __name__ == "__main__":
    (command,) = entry_points(group="console_scripts", name="crosspack")
    command.load()()
