"""The layers that ``kernels.kernelize`` puts in place of transformers' functions of the same names.

Such a layer has no constructor and no members, and its forward takes what the function takes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tools.hub import functions


class chunk_gated_delta_rule(nn.Module):
    """The gated delta rule of Qwen3-Next, Qwen3.5 and OLMo hybrids."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """See :func:`.functions.chunk_gated_delta_rule`."""
        return functions.chunk_gated_delta_rule(
            query,
            key,
            value,
            g,
            beta,
            chunk_size,
            initial_state,
            output_final_state,
            use_qk_l2norm_in_kernel,
            **kwargs,
        )


class causal_conv1d_fn(nn.Module):
    """The short convolution before the scans of hybrid models."""

    def forward(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """See :func:`.functions.causal_conv1d_fn`."""
        return functions.causal_conv1d_fn(hidden_states, weight, bias, activation, **kwargs)
