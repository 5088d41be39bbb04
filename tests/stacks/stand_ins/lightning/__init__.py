"""Stands in for Lightning in tests: its callbacks, with the signatures of version 2.6.6."""
