"""Linear attention, state-space layers and short convolutions that start anew at every segment."""
