"""Lengths to a PackPlan: overflow, strategies, epochs, and the distribution of rows over ranks."""
