"""Arrays of variable-length sequences over memory that somebody else owns: ragged, Arrow, memory-mapped."""
