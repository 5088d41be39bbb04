"""The packed optimizer step: fixed shapes, compiled layers, CUDA graphs."""
