"""The optimizer step over packed rows: its loss, gradient accumulation and checkpoints."""
