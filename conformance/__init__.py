"""The conformance suite: decides whether a backend trains on packed rows without contamination."""
