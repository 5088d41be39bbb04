"""The contract between ``crosspack train`` and the trainers of the backends: jobs, schedules, checkpoints."""
