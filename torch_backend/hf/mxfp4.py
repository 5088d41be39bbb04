"""Loads gpt-oss as it is published: the experts stay in MXFP4, 4 bits a value, while adapters train.

transformers keeps such experts in 4 bits for inference alone, by kernels of the Hub, and makes values of all of them
for training. Here a quantizer of transformers puts an :class:`Mxfp4Weight` where each weight's values would be. The
model is an ordinary one then, of which some weights are frozen.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.utils.quantization_config import Mxfp4Config

from packing_core.errors import UnsupportedModelError
from torch_backend.ops.mxfp4 import Mxfp4Weight

_METHOD = "crosspack_mxfp4"  # of a config's ``quant_method``, while the model is loaded


def load_mxfp4(path: Any, **options: Any) -> Any:
    """Returns the model of a checkpoint in MXFP4, with its experts in 4 bits and frozen; adapters of them train.

    Args:
        path: a folder, or a name on the Hub, as ``from_pretrained`` takes it.
        options: of ``AutoModelForCausalLM.from_pretrained``, such as ``dtype`` and ``device_map``.

    Raises:
        UnsupportedModelError: the checkpoint is not in MXFP4, or this version of transformers loads it otherwise.
    """
    config = options.pop("config", None) or AutoConfig.from_pretrained(path)
    if not is_mxfp4(config):
        raise UnsupportedModelError(f"{path} is no checkpoint in MXFP4: load it with from_pretrained")
    config.quantization_config = config.quantization_config | {"quant_method": _METHOD}
    model = AutoModelForCausalLM.from_pretrained(path, config=config, **options)
    if not any(isinstance(p, Mxfp4Weight) for p in model.parameters()):
        raise UnsupportedModelError("this version of transformers makes values of MXFP4: load_mxfp4 needs 5.17")
    return model


def is_mxfp4(config: Any) -> bool:
    """Returns whether a config is that of a checkpoint in MXFP4."""
    stored = getattr(config, "quantization_config", None)
    return isinstance(stored, dict) and stored.get("quant_method") == "mxfp4"


class _Keep(ConversionOps):
    """Puts blocks and scales in place of a weight's values."""

    def __init__(self, quantizer: Any) -> None:
        self.quantizer = quantizer

    def convert(self, input_dict: dict[str, Any], *_: Any, **others: Any) -> dict[str, Any]:
        name: str = others["full_layer_name"]
        stored_by_end = {key[-len("_blocks") :]: x[0] if isinstance(x, list) else x for key, x in input_dict.items()}
        blocks, scales = stored_by_end["_blocks"], stored_by_end["_scales"]
        weight = Mxfp4Weight(blocks, scales, others["model"].get_parameter(name).dtype)
        return {name: nn.Parameter(weight, requires_grad=False)}


@register_quantization_config(_METHOD)
class _Config(Mxfp4Config):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.quant_method: Any = _METHOD
        self.dequantize = True  # for transformers, so that the model may be trained


@register_quantizer(_METHOD)
class _Quantizer(Mxfp4HfQuantizer):
    def get_weight_conversions(self) -> list[Any]:
        ends = ("_blocks", "_scales")
        return [WeightConverter([w + end for end in ends], w, [_Keep(self)]) for w in ("gate_up_proj", "down_proj")]

    def _process_model_before_weight_loading(self, model: Any, use_kernels: bool = False, **_: Any) -> None:
        """Leaves the modules as they are."""
