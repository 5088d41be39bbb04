"""The difference of logits that ``crosspack bench`` prints."""

from __future__ import annotations

import math

import pytest
import torch

from torch_backend.job.bench import _difference


def test_the_difference_is_relative_to_the_largest_logit_and_infinite_where_one_is_not_a_number() -> None:
    right = [torch.tensor([1.0, -4.0]), torch.tensor([2.0])]
    assert _difference([torch.tensor([1.0, -3.0]), torch.tensor([2.0])], right) == pytest.approx(0.25)
    assert _difference([torch.tensor([1.0, -4.0]), torch.tensor([math.nan])], right) == math.inf
