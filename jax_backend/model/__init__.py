"""The flax decoder: its configuration, its layers, rotary embedding, experts, adapters, and Hugging Face weights."""
