"""Stands in for Unsloth in tests: its masking of prompts, with the signature of version 2026.10.9."""
