"""A plain training loop over rows that are longer than one rank holds: documents are cut over the ranks of a mesh.

Run it: torchrun --nproc-per-node 2 examples/context_parallel.py    (on GPUs by NCCL, elsewhere by gloo)
Needs: pip install 'crosspack[hf]'
"""

import os

try:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader
    from transformers import LlamaConfig, LlamaForCausalLM

    import crosspack
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'crosspack[hf]'") from None

device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # exchanges do not wait for kernels of long attention
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # the same documents and weights on every rank
documents = [torch.randint(1, 500, (int(length),)).numpy() for length in torch.randint(5, 900, (64,))]
config = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("cp",))
model = crosspack.patch(LlamaForCausalLM(config).to(device), mesh=mesh["cp"]).train()
wrapped = DistributedDataParallel(model)

rows = crosspack.PackedDataset(documents, 1024)
loader = DataLoader(rows, batch_size=1, collate_fn=crosspack.PackedCollator(model))  # the same rows on every rank

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
step = crosspack.make_train_step(wrapped, optimizer, max_grad_norm=1.0)
for number, batch in enumerate(loader):
    metrics = step(batch)  # every rank runs its part of the row
    if rank == 0:
        print(f"step {number}: {int(metrics['tokens'])} targets on {ranks} ranks, loss {float(metrics['loss']):.3f}")
if rank == 0:
    print(crosspack.explain(model).layers[0])
dist.barrier()
dist.destroy_process_group()
