"""Eight host devices for the multi-device tests, and quick compilation; set before jax runs."""

from jax_backend.compilation import compile_quickly

compile_quickly("--xla_force_host_platform_device_count=8")
