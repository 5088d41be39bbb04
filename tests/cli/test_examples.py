"""The examples run as they stand, and print what their comments claim."""

from __future__ import annotations

import re
import runpy
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
        "accelerate_ddp.py",
        "plain_loop.py",
        "trainer.py",
        "trl_sft.py",
        "ranks.py",
        "classification.py",
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


def output_here(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What an example prints that leaves nothing behind; a process of its own would import torch again."""
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_a_plain_loop_learns_on_packed_rows(capsys):
    text = output_here("plain_loop.py", capsys)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]
    assert len(losses) > 5
    assert losses[0] == pytest.approx(6.24, abs=0.1)  # log of the vocabulary
    assert "attention -> " in text and "loss of the step: without logits" in text


def test_accelerate_counts_tokens_over_its_ranks(capsys):
    text = output_here("accelerate_ddp.py", capsys)
    losses = [float(loss) for loss in re.findall(r"targets, loss ([\d.]+)", text)]
    assert len(losses) > 10 and losses[0] == pytest.approx(6.24, abs=0.1)
    assert "1 ranks, slowest over mean 1.000" in text


def test_a_trainer_packs_its_data_set_by_one_line(capsys):
    text = output_here("trainer.py", capsys)
    assert "padded: 128 batches of 2 documents" in text
    assert re.search(r"packed: 1[34] batches of 2 rows", text)
    assert "audit:  exact" in text and "loss of the step: without logits" in text


def test_sft_trainer_is_exact_by_one_line(capsys):
    text = output_here("trl_sft.py", capsys)
    assert "as it is: contaminated" in text and "packed:   exact" in text
    assert "metrics of the step: TRL's entropy and mean_token_accuracy need logits" in text
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", text)]
    assert losses[-1] < losses[0]


def test_a_classifier_learns_on_packed_rows():
    accuracy, loss = re.search(r"accuracy ([\d.]+), loss ([\d.]+)", output("classification.py")).groups()
    assert float(accuracy) > 0.9 and float(loss) < 0.5


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
