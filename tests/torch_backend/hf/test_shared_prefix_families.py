"""share_prefix="auto" in every family: padded calls share a prompt exactly, or run as they are for a reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from packing_core.budget import EPSILON, floor_of, worst_by_bound
from tests.torch_backend.hf.test_families import EXACT
from tests.torch_backend.hf.test_shared_prefix_compiled import answers
from tests.torch_backend.models import error, in_float64, tiny
from torch_backend import patch
from torch_backend.auditing.compare import differences
from torch_backend.hf.inputs.unpadding import unpad_calls
from torch_backend.hf.patch import state_of

FLOAT32 = ("inkling2_text", "xglm")  # whose own code computes in it, whatever the weights are
QUICK = ("gemma4_text", "opt", "bloom")  # sizes that differ by layer; positions of its own; ALiBi


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in EXACT]
)
def test_a_call_shares_its_prompt_exactly_or_runs_as_it_is(family: str) -> None:
    ids, mask = answers(80, 3, 5, 4)
    ids, targets = ids % 30, torch.where(mask[:, 1:] == 1, ids[:, 1:] % 30, -100)
    runs = []
    for share in (False, "auto"):
        model = patch(tiny(family) if family in FLOAT32 else in_float64(tiny(family)), verify=False).train()
        unpad_calls(model, always=True, share_prefix=share)
        logits = model(input_ids=ids, attention_mask=mask).logits
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten()).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        runs.append((logits.detach() * mask[..., None], gradients))
    prefixes = state_of(model).unpadding.prefixes
    assert (prefixes.computed == 80 + 3 + 5 + 4) == (prefixes.refused is None), str(prefixes)
    (logits, gradients), (found, shared) = runs
    assert error(found, logits) <= 1e-5
    # Recurrent layers compute in float32 whatever the weights are, and round as the audit allows float32 to.
    difference, allowed, worst = worst_by_bound(
        differences(shared, gradients), floor_of(EPSILON["float32"]), differences(gradients, gradients)
    )
    assert difference <= allowed, f"{worst}: {difference:.1e}, where rounding allows {allowed:.1e}"
