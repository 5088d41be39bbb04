"""See :mod:`axolotl`."""
