"""Accelerate on one process or several: rows dealt so that ranks finish together, the loss over the tokens of all.

Run it: python examples/accelerate_ddp.py
Or:     torchrun --nproc-per-node 2 examples/accelerate_ddp.py
Needs: pip install 'crosspack[hf]'
"""

try:
    import numpy as np
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader
    from transformers import LlamaConfig, LlamaForCausalLM

    import crosspack
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'crosspack[hf]'") from None

accelerator = Accelerator(cpu=not torch.cuda.is_available())
rng = np.random.default_rng(0)
documents = [rng.integers(1, 500, n) for n in rng.integers(5, 200, 256)]

torch.manual_seed(0)
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
model = accelerator.prepare(crosspack.patch(model)).train()  # patched first; DDP if there are several ranks
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

cost = crosspack.Cost.from_config(accelerator.unwrap_model(model).config)
rows = crosspack.StreamedRows(documents, 1024, seed=0, equal_cost=True, cost=cost)  # every document on one rank
loader = DataLoader(rows, batch_size=None)  # not prepared: accelerate would deal the rows again

step = crosspack.make_train_step(model, optimizer, max_grad_norm=1.0)
for number, batch in enumerate(loader):
    metrics = step(batch)  # targets are counted, and gradients reduced, over all ranks
    accelerator.print(f"step {number}: {int(metrics['tokens'])} targets, loss {metrics['loss'].item():.3f}")
accelerator.print(crosspack.explain(step))
