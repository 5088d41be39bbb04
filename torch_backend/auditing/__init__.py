"""The proof: packed against every document alone, for a model, a family or somebody's trainer."""
