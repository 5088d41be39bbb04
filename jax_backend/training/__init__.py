"""The optimizer step over packed rows: what it differentiates, how it accumulates, its checkpoints."""
