"""Reads sizes from a Hugging Face config, whose names differ between families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packing_core.planning.pieces import positive

SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")  # that every token visits


class ConfigReader:
    """Reads a config object, or its ``config.json`` as a mapping.

    >>> read = ConfigReader({"n_embd": 64, "text_config": None})
    >>> read("hidden_size", "n_embd"), read("n_inner", default=256), read.find("layer_types")
    (64, 256, None)
    >>> ConfigReader({"intermediate_size": [64, 128]}, layer=1)("intermediate_size")
    128

    Args:
        config: to read.
        layer: whose size is taken where a config lists one for each layer; None for none.
    """

    def __init__(self, config: Any, layer: int | None = None) -> None:
        self.config = config
        self.layer = layer

    def find(self, *names: str) -> Any:
        """Returns the first of several values that the config has, None without any."""
        return self._first(names)[1]

    def __call__(self, *names: str, default: Any = None) -> Any:
        """Returns the first of several sizes that the config has, or the default.

        Raises:
            PackingError: it is not one positive integer.
        """
        name, value = self._first(names)
        if self.layer is not None and isinstance(value, list | tuple) and self.layer < len(value):
            value = value[self.layer]
        return default if value is None else positive(f"the config's {name}", value)

    def is_dense(self, layer: int) -> bool:
        """Returns whether a layer has an MLP where others have experts."""
        if (kinds := self.find("mlp_layer_types")) is not None and layer < len(kinds):
            return bool(kinds[layer] == "dense")
        first = self.find("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index") or 0
        period = self.find("decoder_sparse_step", "moe_layer_interval") or 1
        return layer < first or layer in (self.find("mlp_only_layers") or ()) or (layer + 1) % period != 0

    def _first(self, names: tuple[str, ...]) -> tuple[str, Any]:
        for name in names:
            mapping = isinstance(self.config, Mapping)
            value = self.config.get(name) if mapping else getattr(self.config, name, None)
            if value is not None:
                return name, value
        return "", None
