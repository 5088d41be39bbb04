"""The rules about a batch: its arguments, its boundaries, and padded calls that run packed."""
