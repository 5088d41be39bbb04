"""A plain torch training loop on packed documents: the two lines that a script needs, and what they change.

Run it: python examples/torch_loop.py
"""

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import crosspack

torch.manual_seed(0)
documents = [torch.randint(1, 500, (int(length),)).numpy() for length in torch.randint(5, 200, (256,))]

model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
)
model = crosspack.patch(model)  # line one: every layer attends inside documents, or this raises

rows = crosspack.PackedDataset(documents, 1024)
loader = DataLoader(rows, batch_size=2, collate_fn=crosspack.PackedCollator(model))  # line two: segments are carried

print(f"{len(documents)} documents in {len(rows)} rows, packing efficiency {rows.plan.efficiency:.1%}")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, batch in enumerate(loader):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: {len(batch['packed_lengths'])} segments, loss {loss.item():.3f}")

print(crosspack.explain(model))
