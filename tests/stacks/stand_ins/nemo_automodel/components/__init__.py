"""See :mod:`nemo_automodel`."""
