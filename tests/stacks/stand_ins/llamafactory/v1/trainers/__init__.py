"""See :mod:`llamafactory`."""
