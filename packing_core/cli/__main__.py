"""``python -m packing_core.cli`` is ``crosspack``."""

from packing_core.cli import main

main()
