"""Stands in for LLaMA-Factory in tests: what Crosspack calls of it, with the signatures of version 0.9.5."""
