"""The torch trainer behind ``crosspack train`` and ``crosspack bench``."""
