"""Steps of ``make_train_step`` over the same documents, cut into batches in several ways."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.torch_backend.models import collate, documents, tiny
from torch_backend import make_train_step, patch

LENGTHS = (5, 19, 33, 7, 40, 1, 2, 18)
WHOLE = [slice(0, 8)]
SKEWED = [slice(4, 5), slice(5, 7), slice(0, 4), slice(7, 8)]  # of 39, 1, 60 and 17 targets


def batches(cuts: list[slice], **options: Any) -> list[dict[str, Any]]:
    docs = documents(LENGTHS)
    return [collate(docs[cut], **options) for cut in cuts]


def steps(model: nn.Module, given: list[list[dict[str, Any]]], **options: Any) -> list[dict[str, Any]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = make_train_step(model, optimizer, **options)
    return [step(each) for each in given]


def patched(family: str = "qwen2") -> Any:
    return patch(tiny(family), verify=False)


def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return float(torch.stack([(x - y).detach().abs().max() for x, y in pairs]).max())  # NaN where one is
