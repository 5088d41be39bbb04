"""Stands in for NeMo AutoModel in tests: its collator of packed rows, with the signature of version 0.7.0."""
