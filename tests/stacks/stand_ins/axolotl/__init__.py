"""Stands in for axolotl in tests: the interface of its plugins and trainer, with the signatures of version 0.19.0."""
