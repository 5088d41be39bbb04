"""A plain torch training loop on packed documents: three lines, and the loss of a step is the mean over its tokens.

Run it: python examples/plain_loop.py
Needs: pip install 'crosspack[hf]'
"""

try:
    import torch
    from torch.utils.data import DataLoader
    from transformers import LlamaConfig, LlamaForCausalLM

    import crosspack
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'crosspack[hf]'") from None

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
model = crosspack.patch(model).train()  # line one: every layer attends inside documents, or this raises

rows = crosspack.PackedDataset(documents, 1024)
loader = DataLoader(rows, batch_size=2, collate_fn=crosspack.PackedCollator(model))  # line two: segments are carried
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
step = crosspack.make_train_step(model, optimizer, max_grad_norm=1.0)  # line three: forward to optimizer

print(f"{len(documents)} documents in {len(rows)} rows, packing efficiency {rows.plan.efficiency:.1%}")
for number, batch in enumerate(loader):
    metrics = step(batch)  # or step([batch, another]): every token of both has the same weight
    print(f"step {number}: {int(metrics['tokens'])} targets, loss {metrics['loss'].item():.3f}")

print(crosspack.explain(step))  # which attention runs, and what of the step is fast here
