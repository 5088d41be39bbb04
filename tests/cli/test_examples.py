"""The examples run as they stand, and print what their comments claim."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.torch_backend.torchrun import on_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def output(name: str) -> str:
    result = processes.run([sys.executable, str(EXAMPLES / name)])
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_example_is_run_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "torch_loop.py",
        "ranks.py",
        "dpo.py",
        "reward.py",
        "grpo.py",
        "fsdp2.py",
        "deepspeed_zero3.py",
    }


def test_ranks_share_weights_and_steps():
    text = on_ranks(str(EXAMPLES / "fsdp2.py"))
    losses = [float(loss) for loss in re.findall(r"on 2 ranks, loss ([\d.]+)", text)]
    assert len(losses) > 5 and losses[0] == pytest.approx(6.24, abs=0.1) and losses[-1] < losses[0]


def test_the_page_on_many_gpus_has_the_lines_of_the_examples():
    page = (EXAMPLES.parent / "docs/distributed.md").read_text()
    for name in ("fsdp2", "deepspeed_zero3"):
        (block,) = re.findall(rf"^```{name}\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
        example = (EXAMPLES / f"{name}.py").read_text().splitlines()
        assert not [line for line in block.splitlines() if line not in example]


def test_deepspeed_trains_packed_rows():
    pytest.importorskip("deepspeed", reason="unsupported here: DeepSpeed is no dependency of any extra")
    text = on_ranks(str(EXAMPLES / "deepspeed_zero3.py"))
    assert float(re.search(r"2 ranks, ZeRO-3: loss ([\d.]+)", text).group(1)) == pytest.approx(6.24, abs=0.1)


def test_a_torch_loop_learns_on_packed_rows():
    text = output("torch_loop.py")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]
    assert len(losses) > 5
    assert losses[0] == pytest.approx(6.24, abs=0.1)  # log of the vocabulary
    assert "attention -> " in text


def test_ranks_finish_together_and_a_stream_goes_on_with_fewer_of_them():
    text = output("ranks.py")
    assert float(re.search(r"slowest rank over mean ([\d.]+)", text).group(1)) < 1.05
    assert "the same as without the stop: True" in text


def test_dpo_learns_on_packed_pairs_what_is_exact():
    text = output("dpo.py")
    assert re.search(r"as it is: DPOTrainer .* 16 documents in 16 rows\): exact", text)
    assert re.search(r"packed: +DPOTrainer .* 16 documents in 1 rows\): exact", text)
    margins = [float(margin) for margin in re.findall(r"margin (-?[\d.]+)", text)]
    assert len(margins) > 5 and margins[-1] > margins[0] + 0.5


def test_a_reward_model_learns_on_packed_answers():
    text = output("reward.py")
    assert re.search(r"packed: RewardTrainer .* 16 documents in 1 rows\): exact", text)
    assert re.findall(r"accuracy ([\d.]+)", text)[-1] == "1.00"


def test_grpo_learns_on_packed_completions():
    text = output("grpo.py")
    assert re.search(r"packed: GRPOTrainer .* 16 documents in 1 rows\): exact", text)
    rewards = [float(reward) for reward in re.findall(r"reward ([\d.]+)", text)]
    assert rewards[-1] > rewards[0] + 0.2
