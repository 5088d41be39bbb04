"""Locates the parts of a transformers model, and lists the exceptions of its family."""
