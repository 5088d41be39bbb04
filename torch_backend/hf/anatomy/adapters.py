"""The adapters of PEFT that read more of a row than the token they are applied to.

Most adapters change the weights of a layer, so they are the same for every token. PEFT notes those of a model in its
``peft_config``, whoever added them and when.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def why_not_adapters(*models: Any) -> str | None:
    """Explains why a model's adapters cannot be packed; None if they can."""
    for model in models:
        configs = getattr(model, "peft_config", None)
        for name, config in configs.items() if isinstance(configs, Mapping) else ():
            if getattr(config, "alora_invocation_tokens", None):
                return (
                    f"adapter {name!r} (activated LoRA) starts at the last invocation tokens of a row and acts on all "
                    "documents after them: train it unpacked, or plain LoRA packed"
                )
            if getattr(config, "peft_type", None) == "LILY":
                return (
                    f"adapter {name!r} (LILY) mixes its experts by the mean over all tokens of a batch: train it "
                    "unpacked, or LoRA packed"
                )
    return None
