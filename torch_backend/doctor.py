"""Diagnoses torch for ``crosspack doctor``: devices, the implementation of each kind of layer, missing packages.

Attention is asked what it would choose for layers of usual shapes. Recurrent layers are run: a tiny model of a family
that has them is patched and trained on one packed row, and ``explain`` says what ran.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from packing_core.diagnosis import Diagnosis, LayerChoice, first_served, has_nvidia_driver
from packing_core.errors import MissingExtraError, first_line
from packing_core.extras import require
from torch_backend.ops.attention import AttentionRequest, load, rejections
from torch_backend.ops.operators import TRITON, has_bfloat16, runs_triton

TOKENS, DOCUMENTS = 16_384, (256, 2_048, 16_384)  # of a row, and the lengths of its documents
# what an attention layer has -> the changes to the request of a plain one
ATTENTION: dict[str, dict[str, Any]] = {
    "attention with a sliding window": {"window": 512},
    "attention with softcap": {"softcap": 50.0},
    "attention with sinks": {"sinks": True},
    "attention with ALiBi": {"alibi": True},
    "attention with narrow values (MLA)": {"head_dim": 192, "value_dim": 128, "kv_heads": 16},
}
# kind of recurrent layer -> a family that has it
RECURRENT = {
    "gated delta rule": "qwen3_next",
    "Mamba-2 (SSD)": "mamba2",
    "Mamba (selective scan)": "mamba",
    "short convolution": "lfm2",
    "RG-LRU": "recurrent_gemma",
}


def examine() -> Diagnosis:
    """See the module's docstring.

    Raises:
        MissingExtraError: torch is absent or too old.
    """
    require("torch", extra="torch")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    half = torch.bfloat16 if has_bfloat16(device) else torch.float16
    dtype = half if cuda else torch.float32
    found = [f"cuda:{i}: {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    threads = f"cpu: {torch.get_num_threads()} of {os.cpu_count()} processors in use"
    return Diagnosis(
        devices=(*found, threads),
        judged=f"{device.type}, {str(dtype).removeprefix('torch.')}",
        layers=(*_attention(device, dtype), *_recurrent(device, dtype), *_kernels(device, dtype)),
        faster=tuple(_faster(device, dtype)),
    )


def _request(device: torch.device, dtype: torch.dtype, length: int = 2_048, **changes: Any) -> AttentionRequest:
    plain: dict[str, Any] = {
        "tokens": TOKENS,
        "heads": 16,
        "kv_heads": 4,
        "head_dim": 128,
        "value_dim": 128,
        "dtype": dtype,
        "device": device,
        "segments": TOKENS // length,
        "max_seqlen": length,
        "scale": 128**-0.5,
    }
    return AttentionRequest(**plain | changes)


def _attention(device: torch.device, dtype: torch.dtype) -> list[LayerChoice]:
    lengths = DOCUMENTS if device.type == "cuda" else DOCUMENTS[1:2]  # elsewhere the length decides nothing
    plain = {f"attention, documents of {n:,} tokens": _request(device, dtype, n) for n in lengths}
    others = {layer: _request(device, dtype, **changes) for layer, changes in ATTENTION.items()}
    return [first_served(layer, rejections(request)) for layer, request in (plain | others).items()]


def _recurrent(device: torch.device, dtype: torch.dtype) -> list[LayerChoice]:
    try:
        require("transformers", extra="hf")
    except MissingExtraError as missing:
        return [LayerChoice(layer, "none", str(missing)) for layer in RECURRENT]
    logging.disable(logging.WARNING)  # what the libraries warn of is in the answers
    try:
        return [_run(layer, family, device, dtype) for layer, family in RECURRENT.items()]
    finally:
        logging.disable(logging.NOTSET)


def _run(layer: str, family: str, device: torch.device, dtype: torch.dtype) -> LayerChoice:
    from torch_backend.auditing.tiny import family_config, tiny_config, tiny_model
    from torch_backend.collate import PackedCollator
    from torch_backend.hf.explaining import explain
    from torch_backend.patching import patch

    try:
        model = patch(tiny_model(tiny_config(family_config(family))).to(device, dtype), verify=False)
        batch = PackedCollator(model)([{"input_ids": list(range(n))} for n in (21, 9)])
        moved = {name: x.to(device) if torch.is_tensor(x) else x for name, x in batch.items()}
        model(**moved).logits.float().sum().backward()
    except Exception as error:  # whatever a family's code raises here is the answer
        return LayerChoice(layer, "none", f"{type(error).__name__}: {first_line(error)}")
    found = next(explained for explained in explain(model).layers if explained.route != "attention")
    reasons = [f"not {'on the row' if each == 'row' else each}: {reason}" for each, reason in found.rejected.items()]
    why = [f"as in {family}", found.request, *reasons]
    return LayerChoice(layer, found.serves or found.route, "; ".join(filter(None, why)))


def _kernels(device: torch.device, dtype: torch.dtype) -> list[LayerChoice]:
    triton = runs_triton(torch.empty(1, device=device, dtype=dtype))
    reason = f"Triton {'serves' if triton else 'does not serve'} {dtype} on {device.type}"
    name = "Triton kernel" if triton else "plain torch"
    kinds = ("rotary embedding", "linear layer with cross-entropy (causal_lm_loss)")
    return [LayerChoice(layer, name, reason.replace("torch.", "")) for layer in kinds]


def _faster(device: torch.device, dtype: torch.dtype) -> list[str]:
    advice = []
    if device.type == "cpu":
        if has_nvidia_driver():
            advice.append(
                f"there is an NVIDIA driver, and torch {torch.__version__} finds no GPU: install a CUDA build"
            )
        if torch.get_num_threads() < (os.cpu_count() or 1) // 2:
            advice.append("torch uses few of the processors: unset OMP_NUM_THREADS")
        return advice
    if not TRITON:
        advice.append("rotary embedding, loss, convolution and scans run in plain torch: pip install triton")
    if torch.cuda.get_device_capability(device) >= (9, 0):
        reason = load("flash4").supports(_request(device, dtype))
        if reason is not None:
            advice.append(f"attention runs without flash-attn-4 ({reason}): pip install 'crosspack[flash]'")
    return advice
