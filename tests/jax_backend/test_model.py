"""The flax decoder has the numbers of transformers: same weights, packed rows here, one document at a time there."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh
from safetensors.numpy import load_file, save_file

from jax_backend.batches import to_batch
from jax_backend.explaining import explain
from jax_backend.losses.cross_entropy import packed_cross_entropy
from jax_backend.model import weights
from jax_backend.model.decoder import SCANNED_FROM, Decoder, DecoderConfig
from jax_backend.model.layers import Embedding
from packing_core.errors import LayoutError, PackingError, UnsupportedModelError
from tests.jax_backend.models import CONFIGS, documents, on_disk, packed, saved

# Of those that auto takes: a window and softcaps, sinks and experts, a recurrent layer. ``xla`` is quicker to compile.
BY_AUTO = ("gemma2", "gpt-oss", "qwen3.5")


@pytest.fixture(scope="module", params=list(CONFIGS))
def both(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    reference = saved(request.param, folder)
    return reference, weights.load(folder, implementation=None if request.param in BY_AUTO else "xla")


def relative(found, wanted) -> float:
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def per_document(model: torch.nn.Module) -> tuple[list[np.ndarray], float]:
    """Logits of each document alone, and the mean loss over all trained tokens; leaves gradients on the model."""
    loss, count, logits = torch.zeros(()), 0, []
    for ids in documents(9):
        tokens = torch.from_numpy(ids.astype(np.int64))[None]
        # dynamic NTK keeps the frequencies of the longest document so far
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        out = model(tokens, use_cache=False).logits
        logits.append(out[0].detach().numpy())
        loss = loss + torch.nn.functional.cross_entropy(out[0, :-1], tokens[0, 1:], reduction="sum")
        count += len(ids) - 1
    (loss / count).backward()
    return logits, float(loss.detach() / count)


def packed_loss(model, batch):
    logits = model(batch["input_ids"], batch["segment_ids"], batch["position_ids"])
    total, weight = packed_cross_entropy(logits, batch["targets"], weights=batch["loss_weights"])
    return total / weight, logits


value_and_gradients = nnx.jit(nnx.value_and_grad(packed_loss, has_aux=True))


def test_packed_logits_loss_and_gradients_are_those_of_each_document_alone_in_torch(both) -> None:
    reference, model = both
    batch = packed()
    arrays = {name: jnp.asarray(array) for name, array in to_batch(batch).items()}
    (loss, logits), grads = value_and_gradients(model, arrays)
    wanted_logits, wanted_loss = per_document(reference)

    assert len(batch) > 1 and batch.n_segments > len(batch)
    for source, row, start, length in zip(batch.sources, batch.rows, batch.segment_starts, batch.lengths, strict=True):
        assert relative(logits[row, start : start + length], wanted_logits[source]) < 1e-5
    assert float(loss) == pytest.approx(wanted_loss, rel=1e-6)
    found = weights.export(grads)
    wanted = on_disk(reference, {name: parameter.grad for name, parameter in reference.named_parameters()})
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert relative(found[name], gradient) < 1e-5, name


def test_recomputed_layers_change_no_gradient(tmp_path) -> None:
    saved("qwen2-window-tied", tmp_path)
    model = weights.load(tmp_path, implementation="xla")
    arrays = {name: jnp.asarray(array) for name, array in to_batch(packed()).items()}
    _, kept = value_and_gradients(model, arrays)
    model.remat = True
    _, recomputed = value_and_gradients(model, arrays)
    for one, other in zip(jax.tree.leaves(kept), jax.tree.leaves(recomputed), strict=True):
        assert relative(one, other) < 1e-6


@pytest.mark.parametrize(
    "windows", [[None, None, None], pytest.param([5, None, 5, None, 5], marks=pytest.mark.slow)], ids=str
)
def test_scanned_layers_are_the_same_model_in_and_out_of_folders(windows, tmp_path) -> None:
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    more = {"num_hidden_layers": len(windows), "layer_types": kinds}
    config = transformers.Qwen2Config(**CONFIGS["qwen2-window-tied"]().to_dict() | more)
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path / "in")
    plain = weights.load(tmp_path / "in", implementation="xla")
    mesh = jax.make_mesh((2,), ("fsdp",))
    scanned = weights.load(tmp_path / "in", implementation="xla", scan_layers=True)
    period = len(set(windows))
    assert len(scanned.model.blocks) == period and len(scanned.model.layers) == len(windows) % period
    batch = {name: jnp.asarray(array) for name, array in to_batch(packed()).items()}
    (_, logits), grads = value_and_gradients(scanned, batch)
    (_, wanted), wanted_grads = value_and_gradients(plain, batch)
    assert relative(logits, wanted) < 1e-6
    found = weights.export(grads)
    for name, gradient in weights.export(wanted_grads).items():
        assert relative(found[name], gradient) < 1e-5, name
    weights.save(weights.load(tmp_path / "in", scan_layers=True, mesh=mesh), tmp_path / "out")
    written, given = (load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "in"))
    assert all(np.array_equal(written[name], given[name]) for name in written | given)


def test_layers_are_scanned_by_their_number_and_the_device_unless_it_is_said() -> None:
    def chosen(layers: int, scan_layers: bool | None = None) -> tuple[bool, str]:
        config = DecoderConfig.from_hf(CONFIGS["llama"]().to_dict() | {"num_hidden_layers": layers})
        model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), scan_layers=scan_layers))
        assert model.scan_layers == (len(model.model.blocks) == 1)
        return model.scan_layers, explain(model)[-1].implementation

    assert chosen(SCANNED_FROM) == (True, "scanned") and chosen(SCANNED_FROM - 1) == (False, "one by one")
    assert chosen(SCANNED_FROM, False) == (False, "one by one") and chosen(2, True) == (True, "scanned")
    device = AbstractDevice("NVIDIA H200", num_cores=132, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        assert chosen(2 * SCANNED_FROM) == (False, "one by one")


def test_scanned_layers_start_from_weights_of_their_own() -> None:
    config = DecoderConfig.from_hf(CONFIGS["llama"]().to_dict() | {"num_hidden_layers": 2})
    kernel = Decoder(config, rngs=nnx.Rngs(0), scan_layers=True).model.blocks[0].mlp.up_proj.kernel[...]
    assert kernel.shape == (2, 32, 48) and not np.array_equal(kernel[0], kernel[1])
    assert float(kernel.std()) == pytest.approx(config.initializer_range, rel=0.1)


def test_a_written_folder_is_read_by_transformers_to_the_bit(both, tmp_path) -> None:
    reference, model = both
    weights.save(model, tmp_path / "written")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "written")
    assert type(again) is type(reference)
    tokens = torch.arange(40)[None]
    reference.set_attn_implementation("eager")
    again.set_attn_implementation("eager")
    assert torch.equal(again(tokens).logits, reference(tokens).logits)


def test_bfloat16_checkpoints_keep_float32_master_weights_when_asked(tmp_path) -> None:
    saved("llama", tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    model = weights.load(tmp_path, dtype=jnp.bfloat16, param_dtype=jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype("float32")}
    arrays = {name: jnp.asarray(array) for name, array in to_batch(packed()).items()}
    (_, logits), _ = nnx.eval_shape(value_and_gradients, model, arrays)
    assert logits.dtype == jnp.bfloat16


def test_sharded_checkpoints_are_read(tmp_path) -> None:
    reference = saved("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    model = weights.load(tmp_path)
    embedding = model.model.embed_tokens.embedding[...]
    assert np.array_equal(embedding, reference.get_input_embeddings().weight.detach().numpy())


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path) -> None:
    saved("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.7.mlp.up_proj.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        LayoutError, match=r"lacks \['model.norm.weight'\] and has \['model.layers.7.mlp.up_proj.weight'\]"
    ):
        weights.load(tmp_path)


def test_a_checkpoint_of_another_shape_is_refused_with_both_shapes(tmp_path) -> None:
    saved("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = np.ones(31, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LayoutError, match=r"model.norm.weight has shape \(31,\) and the config asks for \(32,\)"):
        weights.load(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_half_written_weights_are_named(tmp_path, share) -> None:
    saved("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(PackingError, match=r"model\.safetensors is damaged or cut off \(.*\): copy it again"):
        weights.load(tmp_path)


def test_pickled_weights_are_never_read(tmp_path) -> None:
    saved("llama", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(PackingError, match="lacks model.safetensors: only safetensors are read"):
        weights.load(tmp_path)
    with pytest.raises(PackingError, match="holds no config.json"):
        weights.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "mamba2"}, "model_type is 'mamba2' and the flax decoder computes llama, qwen2, qwen3"),
        (
            {"model_type": "bloom"},
            "model_type is 'bloom', and its ALiBi biases are not in the JAX kernels",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu' and the flax decoder computes silu, gelu_pytorch_tanh"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type is 'spiral' and the flax decoder computes default"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1 and the flax decoder has no dropout: set it to 0"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_with_the_reason(change, reason) -> None:
    config = CONFIGS["llama"]().to_dict() | change
    with pytest.raises(UnsupportedModelError, match=reason):
        DecoderConfig.from_hf(config)


def test_a_hybrids_config_may_leave_out_what_transformers_fills_in() -> None:
    told = json.loads(CONFIGS["qwen3.5"]().to_json_string(use_diff=False))
    brief = dict(told) | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    del brief["layer_types"]
    brief["num_hidden_layers"] = told["num_hidden_layers"] = 4
    assert DecoderConfig.from_hf(brief) == DecoderConfig.from_hf(told | {"layer_types": kinds})
    assert DecoderConfig.from_hf(brief).rope.channels == 4
    with pytest.raises(UnsupportedModelError, match="layer_types has 'spiral' and the flax decoder computes"):
        DecoderConfig.from_hf(told | {"layer_types": ["spiral"] * 4})


def test_the_config_layout_of_transformers_4_gives_the_same_decoder() -> None:
    new = json.loads(CONFIGS["llama3-rope-biases"]().to_json_string(use_diff=False))
    old = dict(new)
    scaling = old.pop("rope_parameters")
    old |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    assert DecoderConfig.from_hf(old) == DecoderConfig.from_hf(new)


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_gradients_of_a_frequent_token_add_up_in_float32(param_dtype: str) -> None:
    table = Embedding(3, 2, dtype=jnp.bfloat16, param_dtype=param_dtype, rngs=nnx.Rngs(0))
    ids = jnp.zeros((1, 1001), int).at[0, 0].set(2)  # sums of ones in bfloat16 end at 256
    grads = nnx.grad(lambda table: table(ids).astype(jnp.float32).sum())(table)
    np.testing.assert_array_equal(grads.embedding[...], [[1000, 1000], [0, 0], [1, 1]])
