"""The examples run as they stand, and print what their comments claim.

They run in this process, where torch is imported already, unless they need several ranks or devices.
"""

from __future__ import annotations

import ast
import os
import re
import runpy
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.torch_backend.ranks import torchrun

EXAMPLES = Path(__file__).parents[2] / "examples"
AUDITED = r"packed: +{}Trainer .* 16 documents in 1 row\): exact"
# Example -> what it prints, as regular expressions; the figure that it prints several times (at least so often), its
# first value, and by how much the last one is higher, or lower; the library that no extra of the tests installs.
CLAIMS: dict[str, dict[str, Any]] = {
    "plain_loop": {"says": ["attention -> ", "loss of the step: without logits"], "first": 6.24, "times": 6},
    "accelerate_ddp": {"figure": "targets, loss ", "first": 6.24, "times": 11},
    "trainer": {
        "says": ["padded: 128 batches of 2 documents", "packed: 1[34] batches of 2 rows", "audit:  exact"]
        + ["loss of the step: without logits"]
    },
    "trl_sft": {
        "says": ["as it is: contaminated", "packed:   exact"]
        + ["metrics of the step: TRL's entropy and mean_token_accuracy need logits"],
        "figure": "'loss': '?",
        "by": -0.01,
    },
    "classification": {"says": [r"accuracy (0\.9|1\.0).*, loss 0\.[0-4]"]},
    "ranks": {"says": [r"slowest rank over mean 1\.0[0-4]", "the same as without the stop: True"]},
    "dpo": {
        "says": [r"as it is: DPOTrainer .* 16 documents in 16 rows\): exact", AUDITED.format("DPO")],
        "figure": "margin ",
        "times": 6,
        "by": 0.5,
    },
    "reward": {"says": [AUDITED.format("Reward"), r"accuracy 1\.00\s*\Z"]},
    "grpo": {"says": [AUDITED.format("GRPO")], "figure": "reward ", "by": 0.2},
    "vision": {"says": ["24 chats in 5 rows, 98% full"], "times": 3, "by": -0.01},
    "shared_prefixes": {
        "says": [r"160 tokens, loss 0\.1278", r"832 tokens, loss 0\.1278", r"gradient: (0e\+00|\de-(0[6-9]|1\d))"]
    },
    "stream_resume": {"says": ["the same losses to the bit: True"]},
    "audit_other_stack": {"says": ["by hand: contaminated", "DataCollatorWithFlattening: "]},
    "jax_loop": {"times": 3, "by": -0.5},
    "jax_own_model": {"says": [r"\Aexact: True"], "figure": ": loss ", "by": -0.5},
    "jax_other_models": {
        "says": [rf"{kind}: exact True, loss [4-9]\.\d+ to [01]\.\d+, resumed True" for kind in ("nnx", "linen")]
    },
    "jax_equinox": {"says": [r"\Aexact: True"], "figure": ": loss ", "times": 4, "by": -2, "needs": "equinox"},
    "jax_tunix": {"says": ["exact: True"], "figure": "(?:loss|to) ", "times": 2, "by": -2, "needs": "tunix"},
    "grain_rows": {"says": [r"inputs \(4, 512\)", "the same as without the stop: True"]},
    "maxtext_keys": {
        "says": ["within documents alone: True"]
        + [r"from grain: \['inputs', 'inputs_position', 'inputs_segmentation', 'targets'"]
    },
    "ray_pack": {"says": ["the same bytes from Ray: True"], "needs": "ray"},
    "gate_backend": {
        "says": ["CausalOnly: exit status 1: .*moved", "InsideDocuments: exit status 0: every test passed"]
    },
}
OF_RANKS, OF_DEVICES = ("fsdp2", "context_parallel"), ("jax_dpo", "jax_grpo")
QUICK = ("ranks", "maxtext_keys")


def paths(*names: str) -> list[str]:
    return [str(EXAMPLES / f"{name}.py") for name in names]


def output(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(*paths(name), run_name="__main__")
    return capsys.readouterr().out


def test_every_example_is_run_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*CLAIMS, *OF_RANKS, *OF_DEVICES, "deepspeed_zero3"}


def imported(path: Path) -> set[str]:
    """Top names of what an example imports and Python does not bring."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    named = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    named += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in named} - sys.stdlib_module_names


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_ends_in_one_line_where_what_it_needs_is_missing(path, monkeypatch):
    (needs,) = re.findall(r"^Needs: (.*)$", path.read_text(), flags=re.MULTILINE)
    for name in imported(path):  # whole, before one of them is missing
        with suppress(ImportError):
            import_module(name)
    for name in imported(path):
        with monkeypatch.context() as patch:
            for missing in [one for one in sys.modules if one.partition(".")[0] == name] + [name]:
                patch.setitem(sys.modules, missing, None)
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(str(path), run_name="__main__")
        assert ended.value.code.endswith(f": {needs}") and "\n" not in ended.value.code


def test_packing_without_ray_ends_in_the_line_of_the_command(tmp_path):
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError('No module named ray', name='ray')\n")
    path = os.pathsep.join((str(tmp_path), str(EXAMPLES.parent)))
    done = processes.run([sys.executable, *paths("ray_pack")], env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 2 and "pip install 'crosspack[ray]'" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in CLAIMS])
def test_an_example_prints_what_it_claims(name, capsys):
    claims = CLAIMS[name]
    if "needs" in claims:
        pytest.importorskip(claims["needs"], reason=f"unsupported here: {claims['needs']} is not installed")
    text = output(name, capsys)
    for said in claims.get("says", ()):
        assert re.search(said, text), (said, text)
    found = [float(x) for x in re.findall(claims.get("figure", "loss ") + r"(-?\d+\.\d+)", text)]
    assert len(found) >= claims.get("times", 0)
    if "first" in claims:  # the log of the vocabulary
        assert found[0] == pytest.approx(claims["first"], abs=0.1)
    if "by" in claims:
        change = (found[-1] - found[0]) / claims["by"]
        assert change > 1, found


# Runs scripts one after the other in a process.
IN_TURN = """
import runpy, sys
for path in sys.argv[1:]:
    sys.argv[:] = [path]
    runpy.run_path(path, run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"), [("fsdp2", "slowest rank over mean 1.0"), ("context_parallel", "straddling documents exchange")]
)
def test_ranks_share_weights_steps_and_documents(name, said):
    text = torchrun(*paths(name))
    losses = [float(loss) for loss in re.findall(r"on 2 ranks, loss ([\d.]+)", text)]
    assert len(losses) > 5 and losses[0] == pytest.approx(6.24, abs=0.1) and losses[-1] < losses[0]
    assert said in text


def test_the_pages_have_the_lines_of_the_examples_for_several_gpus():
    for page, name in (("distributed.md", "fsdp2"), ("trainers.md", "deepspeed_zero3")):
        page = (EXAMPLES.parent / "docs" / page).read_text()
        (block,) = re.findall(rf"^```{name}\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
        example = [line.strip() for line in Path(*paths(name)).read_text().splitlines()]
        assert not [line for line in block.splitlines() if line.strip() not in example]


# DeepSpeed would compile this first, for longer than a test may take; gloo does the same.
WITHOUT_SHM_COMM = """
from deepspeed.ops import __compatible_ops__
__compatible_ops__["deepspeed_shm_comm"] = False
"""


@pytest.mark.slow
def test_deepspeed_trains_packed_rows(tmp_path):
    pytest.importorskip("deepspeed", reason="unsupported here: DeepSpeed is no dependency of any extra")
    (tmp_path / "script.py").write_text(WITHOUT_SHM_COMM + IN_TURN)
    text = torchrun(str(tmp_path / "script.py"), *paths("deepspeed_zero3"))
    assert float(re.search(r"2 ranks, ZeRO-3: loss ([\d.]+)", text).group(1)) == pytest.approx(6.24, abs=0.1)


@pytest.mark.slow
def test_jax_learns_from_preferences_and_rewards_over_a_mesh():
    result = processes.run([sys.executable, "-c", IN_TURN, *paths(*OF_DEVICES)])
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 8 and "accuracy 1.00" in lines[3] and "reward 0.9" in lines[-1]
    assert all(re.search(r" on [48] devices: ", line) for line in lines)  # 4, unless the environment says how many


def test_the_gates_example_takes_no_run_that_cannot_start_for_a_pass(tmp_path, monkeypatch, capsys):
    (tmp_path / "pytest.py").write_text("raise ImportError('No module named pytest')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    text = output("gate_backend", capsys)
    assert text.count("No module named pytest") == 2 and "passed" not in text
