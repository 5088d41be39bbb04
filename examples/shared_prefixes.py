"""A policy-gradient update in which eight answers share one prompt that is computed once.

Run it: python examples/shared_prefixes.py
Needs: pip install 'crosspack[hf]'
"""

try:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    import crosspack
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'crosspack[hf]'") from None

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
config = Qwen3Config(vocab_size=128, num_key_value_heads=2, head_dim=16, **sizes)
model = crosspack.patch(Qwen3ForCausalLM(config)).train()

prompt = torch.randint(4, 128, (96,)).tolist()
answers = [torch.randint(4, 128, (length,)).tolist() for length in (5, 9, 12, 3, 7, 16, 4, 8)]
features = [{"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer} for answer in answers]
advantages = torch.linspace(-1, 1, len(answers))

gradients = []
for share_prefix in (True, False):  # the line
    batch = crosspack.PackedCollator(model, share_prefix=share_prefix)(features)
    logprobs = crosspack.token_logprobs(model, batch).logprobs
    trained = batch["labels"] != -100
    loss = -(logprobs * crosspack.spread(advantages, batch) * trained).sum() / trained.sum()
    model.zero_grad()
    loss.backward()
    gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    print(f"{batch['input_ids'].numel():4} tokens, loss {loss.item():.4f}")

shared, unshared = gradients
print(f"largest difference of a gradient: {((shared - unshared).abs().max() / unshared.abs().max()).item():.0e}")
