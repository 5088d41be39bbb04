"""Everything that knows transformers: how the segments of a batch reach the layers of its models."""
