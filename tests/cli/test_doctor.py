"""``crosspack doctor``: versions, devices and choices, with everything installed and with anything missing."""

from __future__ import annotations

import json
import sys
from importlib.metadata import EntryPoint

import pytest

from crosspack.cli import doctor
from packing_core import extras
from packing_core.diagnosis import Diagnosis, LayerChoice, first_served
from packing_core.errors import MissingExtraError
from tests import processes
from tests.cli.console import run
from tests.house.test_import_hygiene import BLOCK
from torch_backend.doctor import RECURRENT


def examined() -> Diagnosis:
    return Diagnosis(
        ("abacus:0",), "abacus, int3", (LayerChoice("attention", "beads", "not [fast]: no wire"),), ("buy",)
    )


def absent() -> Diagnosis:
    raise MissingExtraError("torch is not installed: pip install 'crosspack[torch]'")


def broken() -> Diagnosis:
    raise OSError("libcudart.so.12: cannot open shared object file")


@pytest.fixture
def backends(monkeypatch):
    """Register functions of this module as the backends that examine themselves."""

    def register(*names: str) -> None:
        entries = [EntryPoint(name, f"{__name__}:{name}", doctor.GROUP) for name in names]
        monkeypatch.setattr(doctor, "entry_points", lambda group: entries if group == doctor.GROUP else [])

    return register


def test_the_installed_backends_say_what_every_kind_of_layer_runs_on():
    result = run("doctor", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["backends"]
    assert set(found) == {"torch", "jax"}
    for backend in found.values():
        assert backend["devices"] and all(layer["implementation"] != "none" for layer in backend["layers"])
    layers = {layer["layer"]: layer for layer in found["torch"]["layers"]}
    assert set(RECURRENT) < set(layers)
    assert layers["attention with sinks"]["implementation"] == "sdpa"  # the only one for CPUs


def test_it_prints_versions_choices_and_what_is_missing(backends, monkeypatch):
    backends("examined", "absent", "broken")
    monkeypatch.setenv("COLUMNS", "80")
    result = run("doctor")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "crosspack[hf]" in text and ">=2.11" in text and ">=5.0" in text and ">=0.10" in text
    assert "abacus:0" in text and "beads" in text and "not [fast]: no wire" in text and "for more speed: buy" in text
    assert "absent cannot be used: torch is not installed: pip install 'crosspack[torch]'" in text
    assert "broken cannot be used: OSError: libcudart.so.12" in text
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_what_is_too_old_or_missing_is_named(backends, monkeypatch):
    backends()
    monkeypatch.setitem(extras.MINIMUM, "torch", "99.0")
    monkeypatch.setattr(doctor, "installed", lambda name: "1.0" if name == "torch" else extras.installed(name))
    packages = {package["name"]: package for package in json.loads(run("doctor", "--json").stdout)["packages"]}
    assert packages["torch"] == {"name": "torch", "installed": "1.0", "needed": ">=99.0", "extra": "torch"} | {
        "state": "too old"
    }
    assert packages["numpy"]["state"] == "ok"
    assert doctor.Package("x", None, ">=1", "hf").state == "missing"


def test_it_works_where_no_framework_is_installed():
    code = BLOCK.format(names=["torch", "jax", "jaxlib", "transformers", "flax", "datasets", "pyarrow", "matplotlib"])
    code += "import sys; sys.argv = ['crosspack', 'doctor', '--json']\nfrom crosspack.cli import main\nmain()"
    result = processes.run([sys.executable, "-c", code])
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)["backends"]
    assert {name: backend["unusable"] for name, backend in found.items()} == {
        name: f"{name} is not installed: pip install 'crosspack[{name}]'" for name in ("torch", "jax")
    }


def test_the_first_that_serves_is_chosen_and_the_others_are_named():
    answers = {"fast": "no GPU", "plain": None, "slow": None}
    assert first_served("attention", answers) == LayerChoice("attention", "plain", "not fast: no GPU")
    assert first_served("attention", {"fast": "no GPU"}).implementation == "none"
