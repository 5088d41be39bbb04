"""Batches of packed rows."""

import torch


def neat_packed_collater(batch, attn_implementation=None, *, packing=None):
    assert packing.packed_mask_type == "document_ids"
    names = ("input_ids", "labels", "position_ids", "attention_mask")
    made = {name: torch.tensor([row[name] for row in batch]) for name in names}
    return {**made, "_packed_seq_ids": made["attention_mask"]}
