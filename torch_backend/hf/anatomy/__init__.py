"""Locates the parts of a transformers model and says what is known of its family."""
