"""Packing inside trainers that somebody else built: Trainer, SFTTrainer, TRL's preference and policy trainers."""
