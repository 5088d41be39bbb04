"""Losses over packed rows, as sums and weights that are divided once per step."""
