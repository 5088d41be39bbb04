"""Stands in for ms-swift in tests: what Crosspack replaces in it, with the signatures of version 4.6.0."""
