"""Stands in for torchtitan in tests: its overrides, dataloader and varlen attention, as in version 0.3.0."""
