"""Cross-entropy with and without whole logits, token log-probabilities, values per document."""
