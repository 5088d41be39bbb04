"""The experts that routers chose, document by document, so that other rows of the same documents can take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from packing_core.errors import LayoutError
from torch_backend.hf.routing.choice import TopK


@dataclass
class RoutingRecord:
    """The experts that a model's routers chose.

    Attributes:
        routers: names of the routers inside the decoder, in order.
        documents: of each document, int16 [L, routers, K]: the experts of its L tokens. A router that takes fewer than
            K fills up with -1. Documents stand in the order of the recorded forwards, and within a forward in source
            order, see :func:`torch_backend.reduce`. Padding is left out. Each row of an unpacked batch is a document.
        choices: how each router makes its choice, as the recording found it. A record without them, such as one of an
            inference engine's experts, lets :func:`replay_routing` run each router once more to find it.
    """

    routers: tuple[str, ...]
    documents: list[Tensor] = field(default_factory=list)
    choices: dict[str, TopK] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.documents)

    def select(self, order: Sequence[int]) -> RoutingRecord:
        """Returns the record of some documents, by number, in the order of the batches that will replay it.

        Raises:
            LayoutError: there is no such document.
        """
        wrong = [number for number in order if not 0 <= number < len(self)]
        if wrong:
            raise LayoutError(
                f"document {wrong[0]} is selected, and the record has {len(self)}: select 0 to {len(self) - 1}"
            )
        return RoutingRecord(self.routers, [self.documents[number] for number in order], self.choices)

    def to(self, device: torch.device | str) -> RoutingRecord:
        """Returns the record on another device."""
        return RoutingRecord(self.routers, [document.to(device) for document in self.documents], self.choices)
