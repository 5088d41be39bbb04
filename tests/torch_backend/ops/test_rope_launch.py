"""A kernel is looked for once per layout and started directly after that, unless tensors begin at odd addresses."""

from __future__ import annotations

import pytest
import torch

from tests.torch_backend.kernels import ONE_DTYPE
from torch_backend.ops.rope import launch
from torch_backend.ops.rope.launch import Launch


class Kernel:
    """In the place of a compiled Triton function: remembers what was started and how."""

    def __init__(self):
        self.started = []

    def __getitem__(self, grid):
        def start(*arguments, num_warps=None):
            looked_for = num_warps is not None
            self.started.append((looked_for, grid, arguments))
            return self if looked_for else None

        return start


def test_the_second_call_starts_what_the_first_one_found():
    kernel = Kernel()
    started = Launch(kernel, (5, 1, 1), 4, 7, 0.5)
    x, y = torch.zeros(8), torch.ones(8)
    started(x, y)
    started(y, x)
    (first, *_), (second, grid, arguments) = kernel.started
    assert first and not second
    assert grid == (5, 1, 1) and arguments == (y.data_ptr(), x.data_ptr(), 7, 0.5)


def test_odd_addresses_never_meet_a_kernel_that_was_found_for_even_ones():
    kernel, memory = Kernel(), torch.zeros(64)
    even, odd = memory[4:8], memory[1:5]
    started = Launch(kernel, (1, 1, 1), 4)
    for x in (odd, odd, even, even, odd):
        started(x)
    assert [looked_for for looked_for, *_ in kernel.started] == [True, True, True, False, True]


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)  # settles how kernels are defined before they are
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.double(),
        lambda x: x.transpose(0, 1),
        lambda x: torch.cat((x, x)),
        lambda x: x.to("meta"),
    ],
    ids=["dtype", "strides", "tokens", "device"],
)
def test_another_layout_is_another_plan(where, change):
    x, angle = where.draw(4, 4, 8), where.draw(4, 4)

    def plan(x):
        layouts = [launch._layout(each) for each in (x, x, x, x, angle, angle)]
        return launch._rotation(tuple(layouts), (), False, False, False, True, False, 0.0)

    assert plan(x) is plan(x.clone())
    assert plan(x) is not plan(change(x))
