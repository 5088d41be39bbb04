"""The package for the Kernels Hub: what it holds, and that it computes the oracle where no crosspack is installed."""

from __future__ import annotations

import ast
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.utils.import_utils import is_kernels_available

from packing_core import reference
from packing_core.budget import largest
from packing_core.errors import PackingError, UnsupportedError
from tests.processes import run
from tools.hub import functions, package
from torch_backend.segments import PackedMetadata

needs_kernels = pytest.mark.skipif(find_spec("kernels") is None, reason="needs the library kernels")
needs_accepted_kernels = pytest.mark.skipif(
    not is_kernels_available(), reason="needs a version of the library kernels that this transformers takes"
)
LENGTHS, KEYS = (5, 17, 1, 12), (9, 17, 3, 12)
PLACES = np.concatenate([np.arange(n) for n in LENGTHS])
FREQUENCIES = 10.0 ** -np.arange(8)
ANGLES = PLACES[:, None] * FREQUENCIES
TOLERANCE = 2e-5  # of the largest value, float32

# Runs in a process that knows nothing of this repository: a folder with inputs in, the outputs and gradients out.
ALONE = """
import sys, json, importlib.util, numpy as np, torch
variant, folder = sys.argv[1:]
name = json.load(open(f"{variant}/metadata.json"))["id"]
spec = importlib.util.spec_from_file_location(name, f"{variant}/__init__.py")
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
spec.loader.exec_module(module)
assert not {"torch_backend", "packing_core", "tools", "crosspack"} & set(sys.modules)
x = {k: torch.from_numpy(v) for k, v in np.load(f"{folder}/in.npz").items()}
found = {}
def keep(case, out, *inputs):
    found[case] = out.detach().numpy()
    for i, gradient in enumerate(torch.autograd.grad(out, inputs, torch.ones_like(out))):
        found[f"{case} {i}"] = gradient.numpy()
def leaves(*names):
    return [x[n].clone().requires_grad_() for n in names]
q, k, v = leaves("q", "k", "v")
bounds, longest = x["bounds"], int(x["bounds"].diff().max())
attend = module.flash_attn_varlen_func
keep("attention", attend(q, k, v, bounds, bounds, longest, longest, causal=True, window_size=(6, 6)), q, k, v)
more_k, more_v = leaves("more_k", "more_v")
more, most = x["key_bounds"], int(x["key_bounds"].diff().max())
keep("more keys", attend(q, more_k, more_v, bounds, more, longest, most, causal=True), q, more_k, more_v)
keep("both ways", module.flash_attn_func(q[None], k[None], v[None])[0], q, k, v)
dq, dk, dv, g, beta = leaves("dq", "dk", "dv", "g", "beta")
keep("delta", module.chunk_gated_delta_rule(dq, dk, dv, g, beta, cu_seqlens=bounds)[0], dq, dk, dv, g, beta)
h, w, b = leaves("h", "w", "b")
keep("convolution", module.layers.causal_conv1d_fn()(h, w, b, "silu", seq_idx=x["seq_idx"]), h, w, b)
keep("convolution by boundaries", module.causal_conv1d_fn(h, w, b, "silu", cu_seq_lens_q=bounds), h, w, b)
keep("rope", torch.cat(module.apply_rope(q, k, x["cos"], x["sin"]), 1), q, k)
np.savez(f"{folder}/out.npz", **found)
"""

# Trains tiny models on a packed batch through transformers' own hooks: a name of an attention, a mapping of layers.
IN_TRANSFORMERS = """
import sys
from pathlib import Path
from transformers import DataCollatorWithFlattening
from tests.torch_backend.models import alone, assert_same, documents, run_of, tiny
how, folder = sys.argv[1:]
docs = documents((5, 1, 14))
model = tiny("qwen3" if how == "attention" else "qwen3_next")
want = alone(model, docs)
if how == "attention":
    model.set_attn_implementation("crosspack/crosspack-kernels:flash_attn_varlen_func", allow_all_kernels=True)
else:
    from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping
    names = ("chunk_gated_delta_rule", "causal_conv1d_fn")
    mapping = {name: {"cpu": LocalLayerRepository(Path(folder), layer_name=name)} for name in names}
    with use_kernel_mapping(mapping, inherit_mapping=False):
        model = kernelize(model, device="cpu", mode=Mode.TRAINING)
batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(
    [{"input_ids": document} for document in docs]
)
out = model(**batch, use_cache=False)
assert_same(run_of(model, list(out.logits[0].split((5, 1, 14))), out.loss), want)
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package.write(tmp_path_factory.mktemp("hub") / "package", ["cuda", "cpu"])


def bounds_of(lengths: tuple[int, ...]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def drawn() -> dict[str, np.ndarray]:
    rng, tokens, keys = np.random.default_rng(0), sum(LENGTHS), sum(KEYS)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    unit = {name: normal(1, tokens, 2, 16) for name in ("dq", "dk")}
    unit = {name: x / np.linalg.norm(x, axis=-1, keepdims=True) for name, x in unit.items()}
    return unit | {
        "q": normal(tokens, 4, 16), "k": normal(tokens, 2, 16), "v": normal(tokens, 2, 16),
        "more_k": normal(keys, 2, 16), "more_v": normal(keys, 2, 16),
        "bounds": bounds_of(LENGTHS), "key_bounds": bounds_of(KEYS),
        "dv": normal(1, tokens, 4, 16), "g": -np.abs(normal(1, tokens, 4)), "beta": np.abs(normal(1, tokens, 4)) % 1,
        "h": normal(1, 6, tokens), "w": normal(6, 4), "b": normal(6),
        "seq_idx": np.repeat(np.arange(len(LENGTHS)), LENGTHS)[None].astype(np.int32),
        "cos": np.cos(ANGLES).astype(np.float32), "sin": np.sin(ANGLES).astype(np.float32),
    }  # fmt: skip


@pytest.fixture(scope="module")
def computed(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    folder = tmp_path_factory.mktemp("run")
    np.savez(folder / "in.npz", **drawn())
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"TRITON_INTERPRET": "1"}
    # -I and a finder that hides the project, which an editable install would put on the path
    hide = "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f)]\n"
    script = folder / "alone.py"
    script.write_text(hide + ALONE)
    command = [sys.executable, str(script), str(repository / "build" / "torch-cpu"), str(folder)]
    result = run(command, env=environment, cwd=folder)
    assert result.returncode == 0, result.stderr
    with np.load(folder / "out.npz") as found:
        return dict(found)


def assert_same(computed: dict[str, np.ndarray], case: str, out: Any, *gradients: Any) -> None:
    for name, want in ((case, out), *((f"{case} {i}", g) for i, g in enumerate(gradients))):
        got, wanted = computed[name].astype(np.float64), np.asarray(want).reshape(computed[name].shape)
        assert np.abs(got - wanted).max() <= TOLERANCE * max(float(largest(wanted)), 1.0), name


def test_attention_is_the_oracle(computed: dict[str, np.ndarray]) -> None:
    x = drawn()
    q, k, v, bounds = x["q"], x["k"], x["v"], x["bounds"]
    for case, cuts, options in (
        ("attention", bounds, {"causal": True, "window": 7}),
        ("both ways", np.array([0, len(q)]), {"causal": False}),
    ):
        out = reference.attention(q, k, v, cuts, **options)
        gradients = reference.attention_vjp(q, k, v, cuts, np.ones_like(out), **options)
        assert_same(computed, case, out, *(gradients[name] for name in "qkv"))


def test_queries_are_the_last_tokens_of_longer_keys(computed: dict[str, np.ndarray]) -> None:
    x = drawn()
    queries = np.zeros((sum(KEYS), 4, 16))
    last = np.concatenate([np.arange(end - n, end) for end, n in zip(np.cumsum(KEYS), LENGTHS, strict=True)])
    queries[last] = x["q"]
    out = reference.attention(queries, x["more_k"], x["more_v"], x["key_bounds"], causal=True)
    seed = np.zeros_like(out)
    seed[last] = 1
    inputs = queries, x["more_k"], x["more_v"], x["key_bounds"]
    gradients = reference.attention_vjp(*inputs, seed, causal=True)
    assert_same(computed, "more keys", out[last], gradients["q"][last], gradients["k"], gradients["v"])


def test_the_delta_rule_is_the_oracle(computed: dict[str, np.ndarray]) -> None:
    x = drawn()
    q, k, v, g, beta = (x[name][0] for name in ("dq", "dk", "dv", "g", "beta"))
    inputs = np.repeat(q, 2, 1), np.repeat(k, 2, 1), v, g, beta, x["bounds"]
    out = reference.gated_delta_rule(*inputs)
    gradients = reference.gated_delta_rule_vjp(*inputs, np.ones_like(out))
    shared = [gradients[name].reshape(len(q), 2, 2, 16).sum(2) for name in "qk"]
    assert_same(computed, "delta", out, *shared, *(gradients[name] for name in ("v", "g", "beta")))


@pytest.mark.parametrize("case", ["convolution", "convolution by boundaries"])
def test_the_convolution_is_the_oracle(computed: dict[str, np.ndarray], case: str) -> None:
    x = drawn()
    inputs, options = (x["h"][0].T, x["w"], x["bounds"]), {"bias": x["b"], "silu": True}
    out = reference.short_convolution(*inputs, **options)
    gradients = reference.short_convolution_vjp(*inputs, np.ones_like(out), **options)
    assert_same(computed, case, out.T, gradients["x"].T, gradients["weight"], gradients["bias"])


def test_rope_is_the_oracle(computed: dict[str, np.ndarray]) -> None:
    x = drawn()
    turned = [reference.rope(x[name], PLACES, FREQUENCIES) for name in "qk"]
    gradients = [reference.rope_vjp(x[name], PLACES, FREQUENCIES, np.ones_like(x[name]))["x"] for name in "qk"]
    assert_same(computed, "rope", np.concatenate(turned, 1), *gradients)


def test_a_build_imports_torch_triton_numpy_and_itself_alone(repository: Path) -> None:
    outside = set()
    for file in (repository / "build" / "torch-cuda").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                outside |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                outside.add(str(node.module).partition(".")[0])
    assert outside - set(sys.stdlib_module_names) <= {"torch", "triton", "numpy"}


def test_a_copy_is_the_source_but_for_its_imports_and_its_namespace(repository: Path) -> None:
    root = Path(package.__file__).parents[2]
    identity = json.loads((repository / "build" / "torch-cuda" / "metadata.json").read_text())["id"]
    changed = []
    for file in (repository / "build" / "torch-cuda").rglob("*.py"):
        source = root / file.relative_to(repository / "build" / "torch-cuda")
        copy = file.read_text()
        if file.parent.name == "torch-cuda" or (file.name == "__init__.py" and not copy):
            continue
        for mine, theirs in zip(source.read_text().splitlines(), copy.splitlines(), strict=True):
            if mine != theirs and mine.lstrip().partition(" ")[0] != "from":
                changed.append(theirs)
    assert changed == [f'NAMESPACE = "{identity}"  # a copy of these files for the Kernels Hub has one of its own']


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(PackingError, match="is not empty: give a new folder"):
        package.write(tmp_path)


def test_what_would_be_ignored_is_refused() -> None:
    x = torch.zeros(4, 2, 16)
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="drop nothing: set attention_dropout to 0"):
        functions.flash_attn_varlen_func(x, x, x, bounds, bounds, 4, 4, dropout_p=0.1)
    with pytest.raises(UnsupportedError, match="without causal both sides must be the same"):
        functions.flash_attn_varlen_func(x, x, x, bounds, bounds, 4, 4, window_size=(2, 3))
    with pytest.raises(UnsupportedError, match="no activation 'gelu': pass silu or None"):
        functions.causal_conv1d_fn(torch.zeros(1, 2, 4), torch.zeros(2, 3), activation="gelu")
    for name, call in {
        "head_first": lambda: functions.chunk_gated_delta_rule(x, x, x, x[..., 0], x[..., 0], head_first=True),
        "allow_neg_eigval": lambda: functions.chunk_gated_delta_rule(x, x, x, x, x, allow_neg_eigval=True),
        "cp_context": lambda: functions.chunk_gated_delta_rule(x, x, x, x, x, cp_context=object()),
        "initial_states": lambda: functions.causal_conv1d_fn(x[0], x[0, 0], initial_states=x),
    }.items():
        with pytest.raises(UnsupportedError, match=f"{name} is given, which these kernels do not follow"):
            call()


def test_metadata_is_made_once_for_the_same_boundaries_and_anew_when_they_change() -> None:
    q, bounds = torch.zeros(6, 2, 16), torch.tensor([0, 2, 6], dtype=torch.int32)
    first = functions._metadata(bounds, 4, q)
    assert functions._metadata(bounds, 4, q) is first
    bounds[1] = 3
    assert functions._metadata(bounds, 4, q) is not first


@pytest.mark.parametrize("name", ["cu_seqlens", "seq_idx"])
def test_layers_of_a_hybrid_share_what_is_made_of_the_boundaries(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(functions, "gated_delta_rule", lambda q, k, v, *rest, **options: v)  # it needs Triton
    for owner, function in ((PackedMetadata, "from_boundaries"), (functions, "_positions")):
        real = getattr(owner, function)
        monkeypatch.setattr(owner, function, lambda *a, real=real, **k: made.append(name) or real(*a, **k))
    marks = {"cu_seqlens": torch.tensor([0, 2, 6]), "seq_idx": torch.tensor([[0, 0, 1, 1, 1, 1]])}[name]
    x, q, gate = torch.randn(1, 3, 6), torch.randn(1, 6, 2, 16), torch.zeros(1, 6, 2)
    for _ in range(3):  # layers
        functions.causal_conv1d_fn(x, torch.randn(3, 4), **{name: marks})
        if name == "cu_seqlens":
            functions.chunk_gated_delta_rule(q, q, q, gate, gate, cu_seqlens=marks)
    assert len(made) == 1
    marks += 0  # written to, as for the next batch
    functions.causal_conv1d_fn(x, torch.randn(3, 4), **{name: marks})
    assert len(made) == 2


def test_nothing_is_remembered_in_a_graph_or_in_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    q, bounds = torch.zeros(6, 2, 16), torch.tensor([0, 2, 6], dtype=torch.int32)
    with torch.inference_mode():
        inside = functions._metadata(bounds, 4, q)
        functions._metadata(bounds.clone(), 4, q)  # made in that mode: it counts no writes
    first = functions._metadata(bounds, 4, q)
    assert first is not inside and not first.cu_seqlens.is_inference()
    # a graph that holds these boundaries would replay those of the batch that warmed it up
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert functions._metadata(bounds, 4, q) is not first


def test_tokens_after_the_last_boundary_are_padding_and_rows_end_sequences() -> None:
    packed = functions._of_rows(torch.tensor([0, 3, 7]), 2, 5, torch.zeros(1))
    assert packed.cu_seqlens.unique().tolist() == [0, 3, 5, 7, 10]


@needs_kernels
def test_the_library_loads_the_folder_and_reads_its_build_file(repository: Path) -> None:
    import kernels

    loaded = kernels.get_local_kernel(repository, backend="cpu")
    assert set(loaded.__all__) >= {"flash_attn_varlen_func", "chunk_gated_delta_rule", "causal_conv1d_fn", "layers"}
    built = kernels._rust.Build.open(str(repository))
    assert [str(backend) for backend in built.general.backends] == ["cuda", "cpu"]


@needs_accepted_kernels
@pytest.mark.slow
@pytest.mark.parametrize("how", ["attention", "layers"])
def test_transformers_trains_packed_rows_through_its_own_hooks(repository: Path, how: str) -> None:
    root = Path(package.__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    local = {"LOCAL_KERNELS": f"{package.REPOSITORY}={repository}", "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-c", IN_TRANSFORMERS, how, str(repository)]
    result = run(command, env=os.environ | local, limit=300)
    assert result.returncode == 0, result.stderr
