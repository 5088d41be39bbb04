"""The examples run as they stand, and print what their comments claim."""

from __future__ import annotations

import ast
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
        "shared_prefixes.py",
        "vision.py",
        "fsdp2.py",
        "context_parallel.py",
        "deepspeed_zero3.py",
        "jax_loop.py",
        "jax_own_model.py",
        "jax_other_models.py",
        "jax_tunix.py",
        "jax_dpo.py",
        "jax_grpo.py",
        "grain_rows.py",
        "maxtext_keys.py",
        "stream_resume.py",
        "ray_pack.py",
        "gate_backend.py",
        "audit_other_stack.py",
    }


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_begins_by_what_it_shows_and_how_to_run_it(path):
    purpose, _, usage = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")
    assert purpose.endswith(".") and "\n" not in purpose and usage.startswith("Run it: ") and path.name in usage


@pytest.mark.slow
def test_ranks_share_weights_and_steps():
    text = on_ranks(str(EXAMPLES / "fsdp2.py"))
    losses = [float(loss) for loss in re.findall(r"on 2 ranks, loss ([\d.]+)", text)]
    assert len(losses) > 5 and losses[0] == pytest.approx(6.24, abs=0.1) and losses[-1] < losses[0]


@pytest.mark.slow
def test_ranks_share_documents():
    text = on_ranks(str(EXAMPLES / "context_parallel.py"))
    losses = [float(loss) for loss in re.findall(r"on 2 ranks, loss ([\d.]+)", text)]
    assert len(losses) > 5 and losses[0] == pytest.approx(6.24, abs=0.1) and losses[-1] < losses[0]
    assert "straddling documents exchange" in text


def test_the_pages_have_the_lines_of_the_examples_for_several_gpus():
    for page, name in (("distributed.md", "fsdp2"), ("deepspeed.md", "deepspeed_zero3")):
        page = (EXAMPLES.parent / "docs" / page).read_text()
        (block,) = re.findall(rf"^```{name}\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
        example = (EXAMPLES / f"{name}.py").read_text().splitlines()
        assert not [line for line in block.splitlines() if line not in example]


# DeepSpeed would compile this first, for longer than a test may take; gloo does the same.
WITHOUT_SHM_COMM = """
import runpy
from deepspeed.ops import __compatible_ops__
__compatible_ops__["deepspeed_shm_comm"] = False
runpy.run_path({!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_deepspeed_trains_packed_rows(tmp_path):
    pytest.importorskip("deepspeed", reason="unsupported here: DeepSpeed is no dependency of any extra")
    script = tmp_path / "without_shm_comm.py"
    script.write_text(WITHOUT_SHM_COMM.format(str(EXAMPLES / "deepspeed_zero3.py")))
    text = on_ranks(str(script))
    assert float(re.search(r"2 ranks, ZeRO-3: loss ([\d.]+)", text).group(1)) == pytest.approx(6.24, abs=0.1)


def output_here(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs an example that leaves no files and returns its output; a new process would import torch again."""
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_plain_loop_learns_on_packed_rows(capsys):
    text = output_here("plain_loop.py", capsys)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]
    assert len(losses) > 5
    assert losses[0] == pytest.approx(6.24, abs=0.1)  # log of the vocabulary
    assert "attention -> " in text and "loss of the step: without logits" in text


@pytest.mark.slow
def test_accelerate_counts_tokens_over_its_ranks(capsys):
    text = output_here("accelerate_ddp.py", capsys)
    losses = [float(loss) for loss in re.findall(r"targets, loss ([\d.]+)", text)]
    assert len(losses) > 10 and losses[0] == pytest.approx(6.24, abs=0.1)
    assert "1 ranks, slowest over mean 1.000" in text


@pytest.mark.slow
def test_a_trainer_packs_its_data_set_by_one_line(capsys):
    text = output_here("trainer.py", capsys)
    assert "padded: 128 batches of 2 documents" in text
    assert re.search(r"packed: 1[34] batches of 2 rows", text)
    assert "audit:  exact" in text and "loss of the step: without logits" in text


@pytest.mark.slow
def test_sft_trainer_is_exact_by_one_line(capsys):
    text = output_here("trl_sft.py", capsys)
    assert "as it is: contaminated" in text and "packed:   exact" in text
    assert "metrics of the step: TRL's entropy and mean_token_accuracy need logits" in text
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", text)]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_a_classifier_learns_on_packed_rows():
    accuracy, loss = re.search(r"accuracy ([\d.]+), loss ([\d.]+)", output("classification.py")).groups()
    assert float(accuracy) > 0.9 and float(loss) < 0.5


def test_ranks_finish_together_and_a_stream_goes_on_with_fewer_of_them():
    text = output("ranks.py")
    assert float(re.search(r"slowest rank over mean ([\d.]+)", text).group(1)) < 1.05
    assert "the same as without the stop: True" in text


@pytest.mark.slow
def test_dpo_learns_on_packed_pairs_what_is_exact():
    text = output("dpo.py")
    assert re.search(r"as it is: DPOTrainer .* 16 documents in 16 rows\): exact", text)
    assert re.search(r"packed: +DPOTrainer .* 16 documents in 1 rows\): exact", text)
    margins = [float(margin) for margin in re.findall(r"margin (-?[\d.]+)", text)]
    assert len(margins) > 5 and margins[-1] > margins[0] + 0.5


@pytest.mark.slow
def test_a_reward_model_learns_on_packed_answers():
    text = output("reward.py")
    assert re.search(r"packed: RewardTrainer .* 16 documents in 1 rows\): exact", text)
    assert re.findall(r"accuracy ([\d.]+)", text)[-1] == "1.00"


@pytest.mark.slow
def test_grpo_learns_on_packed_completions():
    text = output("grpo.py")
    assert re.search(r"packed: GRPOTrainer .* 16 documents in 1 rows\): exact", text)
    rewards = [float(reward) for reward in re.findall(r"reward ([\d.]+)", text)]
    assert rewards[-1] > rewards[0] + 0.2


@pytest.mark.slow
def test_a_jax_loop_learns_on_packed_rows(capsys):
    text = output_here("jax_loop.py", capsys)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]
    assert len(losses) == 3 and losses[-1] < losses[0] - 0.5


@pytest.mark.slow
def test_flaxs_own_layers_are_exact_and_learn_from_grain_and_orbax(capsys):
    lines = output_here("jax_other_models.py", capsys).splitlines()
    assert [line.split(":")[0] for line in lines] == ["nnx", "linen"]
    for line in lines:
        first, last = (float(loss) for loss in re.findall(r"\d\.\d+", line))
        assert "exact True" in line and "resumed True" in line and last < first - 3


@pytest.mark.slow
def test_tunix_trains_adapters_in_packed_rows():
    pytest.importorskip("tunix", reason="unsupported here: google-tunix is in none of the extras that the tests need")
    first, last = output("jax_tunix.py").splitlines()[-2:]
    before, after = (float(loss) for loss in re.findall(r"\d\.\d+", last))
    assert first == "exact: True" and after < before - 2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "last"), [("jax_dpo", "accuracy 1.00"), ("jax_grpo", "reward 0.9")])
def test_jax_learns_from_preferences_and_rewards_over_a_mesh(name, last):
    lines = output(f"{name}.py").splitlines()
    assert len(lines) == 4 and last in lines[-1]
    assert all(re.search(r" on [48] devices: ", line) for line in lines)  # 4, unless the environment says how many


@pytest.mark.slow
def test_an_nnx_model_of_ones_own_is_exact_and_learns(capsys):
    text = output_here("jax_own_model.py", capsys)
    losses = [float(loss) for loss in re.findall(r": loss ([\d.]+)", text)]
    assert text.startswith("exact: True") and losses[-1] < losses[0] - 0.5


@pytest.mark.slow
def test_grain_deals_rows_to_hosts_and_resumes_a_stream(capsys):
    text = output_here("grain_rows.py", capsys)
    assert "inputs (4, 512)" in text and "the same as without the stop: True" in text


def test_maxtexts_keys_train_within_documents(capsys):
    text = output_here("maxtext_keys.py", capsys)
    assert "within documents alone: True" in text
    assert "from grain: ['inputs', 'inputs_position', 'inputs_segmentation', 'targets'" in text


@pytest.mark.slow
def test_a_stream_and_its_losses_go_on_after_a_stop(capsys):
    assert "the same losses to the bit: True" in output_here("stream_resume.py", capsys)


@pytest.mark.slow
def test_ray_writes_the_bytes_of_one_machine():
    pytest.importorskip("ray", reason="unsupported here: Ray is in none of the extras that the tests need")
    assert "the same bytes from Ray: True" in output("ray_pack.py")


@pytest.mark.slow
def test_the_gate_rejects_a_causal_mask_and_passes_the_document_mask():
    text = output("gate_backend.py")
    assert re.search(r"CausalOnly: exit status 1: .*moved", text)
    assert "InsideDocuments: exit status 0: every test passed" in text


@pytest.mark.slow
def test_other_stacks_are_audited_as_they_are(capsys):
    text = output_here("audit_other_stack.py", capsys)
    assert "by hand: contaminated" in text and "DataCollatorWithFlattening: " in text


@pytest.mark.slow
def test_chats_with_images_train_in_packed_rows():
    text = output("vision.py")
    losses = [float(line.split()[-1]) for line in text.splitlines()[-3:]]
    assert "24 chats in 5 rows, 98% full" in text and losses == sorted(losses, reverse=True)


@pytest.mark.slow
def test_a_prompt_computed_once_trains_like_one_for_every_answer():
    text = output("shared_prefixes.py")
    assert "160 tokens, loss 0.1278" in text and "832 tokens, loss 0.1278" in text
    assert float(text.split()[-1]) < 1e-5
