"""A plain training loop over weights that FSDP2 shards: rows dealt to ranks at equal cost, one step on all of them.

Run it: torchrun --nproc-per-node 2 examples/fsdp2.py    (on GPUs by NCCL, elsewhere by gloo)
Needs: pip install 'crosspack[hf]'
"""

import os

try:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader
    from transformers import LlamaConfig, LlamaForCausalLM

    import crosspack
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'crosspack[hf]'") from None

device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # the same documents and weights on every rank
documents = [torch.randint(1, 500, (int(length),)).numpy() for length in torch.randint(5, 200, (256,))]
config = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = crosspack.patch(LlamaForCausalLM(config).to(device)).train()
mesh = init_device_mesh(device.type, (ranks,))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)

rows = crosspack.PackedDataset(documents, 1024)
dealt = crosspack.balance(rows.plan, ranks, cost=crosspack.Cost.from_config(config))
steps = [step for step, row in enumerate(dealt.steps) if (row < rows.plan.n_rows).all()]  # no rank is ever idle
own = [dealt.rank(rank)[step] for step in steps]
loader = DataLoader(rows, batch_sampler=own, collate_fn=crosspack.PackedCollator(model))

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
step = crosspack.make_train_step(model, optimizer, max_grad_norm=1.0)
for number, batch in enumerate(loader):
    metrics = step(batch)  # the loss is the mean over the targets of all ranks
    if rank == 0:
        print(f"step {number}: {int(metrics['tokens'])} targets on {ranks} ranks, loss {float(metrics['loss']):.3f}")
if rank == 0:
    print(f"slowest rank over mean {dealt.imbalance:.3f}")
dist.barrier()
dist.destroy_process_group()
