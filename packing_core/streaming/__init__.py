"""Packing without knowing all lengths: sources, mixing, and resumable streams of packed rows."""
