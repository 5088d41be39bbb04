"""The edits that a patch makes to a model, each of which can be undone."""
