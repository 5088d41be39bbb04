"""Linear attention with a decay per head over packed rows: for wide heads, and for any width."""
