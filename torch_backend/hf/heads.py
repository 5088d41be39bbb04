"""What stands on top of a decoder, and what packing means for it."""

from __future__ import annotations

from typing import Any

from packing_core.extras import require

require("transformers", extra="hf")

from transformers.loss.loss_utils import ForCausalLMLoss  # noqa: E402


def takes_next_token_loss(root: Any) -> bool:
    """Whether a model's ``loss_function`` is transformers' next-token loss, and not one that a user has set."""
    return root.loss_function is ForCausalLMLoss
