"""See :mod:`torchtitan`."""
