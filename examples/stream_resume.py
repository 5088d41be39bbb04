"""Training on a stream that is stopped and resumed: the state is json, and the losses go on as if nothing had happened.

Run it: python examples/stream_resume.py
Needs: pip install 'crosspack[hf]'
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

try:
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import crosspack
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'crosspack[hf]'") from None


def write(path: Path) -> None:
    """Documents as a file of json lines, of which no more than a buffer is in memory at a time."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 120, 300)
    path.write_text("\n".join(json.dumps({"input_ids": rng.integers(1, 500, n).tolist()}) for n in lengths))


def stream(path: Path) -> crosspack.PackStream:
    """Rows of 512 tokens. The source is a function: it opens the file at any document, which resuming needs."""

    def open_at(start: int):
        for number, record in enumerate(crosspack.read(path)):
            if number >= start:
                yield record["input_ids"]

    return crosspack.stream(open_at, 512, buffer=64, seed=0)


def trainer(checkpoint: dict | None = None):
    """A model with its step, from the start or from a checkpoint."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = crosspack.patch(LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes))).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    return model, optimizer, crosspack.make_train_step(model, optimizer), crosspack.PackedCollator(model)


with TemporaryDirectory() as folder:
    data, saved = Path(folder) / "data.jsonl", Path(folder) / "checkpoint.pt"
    write(data)
    model, optimizer, step, collate = trainer()
    rows, losses = stream(data), []
    for number, row in enumerate(rows):
        losses.append(float(step(collate(row))["loss"]))
        if number == 9:  # the state belongs to the rows that were trained
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"rows": json.dumps(rows.state_dict())}, saved)

    checkpoint = torch.load(saved)
    model, optimizer, step, collate = trainer(checkpoint)
    rows = stream(data)
    rows.load_state_dict(json.loads(checkpoint["rows"]))
    resumed = [float(step(collate(row))["loss"]) for row in rows]

print(f"{len(losses)} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}; stopped after 10")
print(f"{len(resumed)} steps after the stop, the same losses to the bit: {resumed == losses[10:]}")
