"""Trainer with DeepSpeed ZeRO-3 on packed rows: the line that a script needs, under a launcher of several ranks.

Run it: torchrun --nproc-per-node 2 examples/deepspeed_zero3.py
or:     deepspeed --num_gpus 2 examples/deepspeed_zero3.py
Needs: pip install 'crosspack[hf]' deepspeed
"""

import argparse
import os
import tempfile
from pathlib import Path

try:
    import accelerate  # noqa: F401, which Trainer needs
    import datasets
    import deepspeed  # noqa: F401
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    import crosspack
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'crosspack[hf]' deepspeed") from None

options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
options.add_argument("--config", default=str(Path(__file__).with_name("deepspeed_zero3.json")), help="of DeepSpeed")
options.add_argument("--local_rank", type=int, default=0, help="passed by the launcher `deepspeed`")
chosen = options.parse_args()

torch.manual_seed(0)
lengths = torch.randint(5, 200, (256,)).tolist()
data = datasets.Dataset.from_dict({"input_ids": [torch.randint(1, 500, (length,)).tolist() for length in lengths]})

arguments = TrainingArguments(
    tempfile.mkdtemp(),
    deepspeed=chosen.config,
    per_device_train_batch_size=1,
    max_steps=8,
    learning_rate=1e-3,
    logging_steps=1,
    optim="adamw_torch",
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(),
)
config = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=data)
crosspack.enable_packing(trainer, capacity=1024)  # the line
trainer.train()

if trainer.is_world_process_zero():
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"{os.environ.get('WORLD_SIZE', '1')} ranks, ZeRO-3: loss {losses[0]:.3f} to {losses[-1]:.3f}")
    print(crosspack.explain(trainer))
