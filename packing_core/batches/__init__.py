"""PackedBatch and PackedDataset: their checks, views and conventions, and the marks of other people's batches."""
