"""Other people's training stacks with Crosspack inside: their released versions by ``python -m tests.stacks``,
stand-ins with the same signatures in the tests."""
