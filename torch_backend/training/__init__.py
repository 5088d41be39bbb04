"""Training packed: fixed-shape steps, the glue to trainers, and the job behind ``crosspack train``."""
