"""Decoding on the GPU: in parts as in one pass, padded as alone, the cache as nas.cost says, and as on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nas.architecture import Architecture
from nas.cost import DType, cost
from nas.models.modeling import HybridForCausalLM
from tests.gpu.conftest import ids
from tests.gpu.measured import Errors
from tests.models.fla_parity import LAYERS, LINEAR, autocast, build, relative, stack

pytestmark = pytest.mark.gpu

# against float32 on a CPU; bf16 by autocast gave up to 3.6e-2 over 12 layers on an H200
DEVICES = {"float32": 1e-4, "bfloat16": 5e-2}
DTYPES = pytest.mark.parametrize("dtype", DEVICES)


def _refuses_long(mixer: str, dtype: str) -> bool:
    """DeltaNet's chunk kernel, which fla's layer takes above 64 tokens, refuses float32."""
    return mixer == "deltanet" and dtype == "float32"


def _design(mixer: str, form: str) -> Architecture:
    return stack(mixer, mixer) if form == "alone" else stack(mixer, mixer, mixer, "softmax")


def _add(errors: Errors, name: str, found: Tensor, whole: Tensor, truth: Tensor | None) -> None:
    """`found` and `whole` come by two ways. float32: they are equal. bf16: both round, and a model may amplify that by
    much, so the one may be at most twice as far from `truth`, the float32 logits of the same weights, as the other."""
    if truth is None:
        errors.add(name, relative(found, whole), 1e-5)
        return
    one_pass = relative(whole, truth)
    assert one_pass < 0.2
    errors.note(f"{name}, one pass", one_pass)
    errors.add(name, relative(found, truth), 2 * one_pass)


def _truth(design: Architecture, model: HybridForCausalLM) -> HybridForCausalLM | None:
    """The same weights in float32 on the CPU, where no kernel refuses it; None where the model is in float32."""
    if model.dtype == torch.float32:
        return None
    wide = build(design)
    wide.load_state_dict(model.state_dict())  # not .to(): what bf16 has rounded besides the weights would stay so
    return wide


def _in_parts(model: HybridForCausalLM, rows: Tensor, parts: list[int], mask: Tensor | None = None) -> Tensor:
    """Logits of `rows`, handed over part by part with a cache."""
    cache, pieces, seen = None, [], 0
    for part in rows.split(parts, 1):
        seen += part.shape[1]
        out = model(
            part, attention_mask=None if mask is None else mask[:, :seen], past_key_values=cache, use_cache=True
        )
        cache = out.past_key_values
        pieces.append(out.logits)
    return torch.cat(pieces, 1)


@torch.no_grad()
@DTYPES
@pytest.mark.parametrize(
    ("mixer", "form"), [*((mixer, "alone") for mixer in LAYERS), *((mixer, "hybrid") for mixer in LINEAR)]
)
def test_prefill_and_decoding_equal_one_pass(mixer: str, form: str, dtype: str, device: str, errors: Errors) -> None:
    """A prompt by the chunk kernel, single tokens, more at once on top of the cache, single tokens again."""
    design = _design(mixer, form)
    model = build(design).to(device, getattr(torch, dtype))
    parts = [40, *[1] * 5, 15, *[1] * 4] if _refuses_long(mixer, dtype) else [70, *[1] * 5, 33, *[1] * 4]
    rows, truth = ids(device, sum(parts)), _truth(design, model)
    expected = None if truth is None else truth(rows.cpu()).logits
    _add(errors, "logits", _in_parts(model, rows, parts), model(rows).logits, expected)
    errors.check()


@torch.no_grad()
@DTYPES
@pytest.mark.parametrize("mixer", LINEAR)
def test_left_padding_changes_nothing(mixer: str, dtype: str, device: str, errors: Errors) -> None:
    design = _design(mixer, "hybrid")
    model = build(design).to(device, getattr(torch, dtype))
    length = 64 if _refuses_long(mixer, dtype) else 80
    rows, lengths = ids(device, length, 3), (length, 51, 19)
    mask = (torch.arange(length) >= length - torch.tensor(lengths)[:, None]).long().to(device)
    together, truth = _in_parts(model, rows, [length - 4, *[1] * 4], mask), _truth(design, model)
    for row, n in enumerate(lengths):
        alone = rows[row : row + 1, -n:]
        expected = None if truth is None else truth(alone.cpu()).logits[0]
        _add(errors, f"{n} of {length} tokens", together[row, -n:], model(alone).logits[0], expected)
    errors.check()


def _tensors(state: Any) -> Iterator[Tensor]:
    """Every tensor in one entry of a cache: a tensor, None, or a nest of these."""
    if isinstance(state, Tensor):
        yield state
    elif state is not None:
        for part in state:
            yield from _tensors(part)


@torch.no_grad()
@DTYPES
@pytest.mark.parametrize("mixer", LAYERS)
def test_the_cache_holds_what_the_cost_says(mixer: str, dtype: DType, device: str, errors: Errors) -> None:
    """Logical bytes and the bytes of the storage behind them, to the byte, after a prompt and two tokens on top."""
    design = _design(mixer, "alone")
    model = build(design).to(device, getattr(torch, dtype))
    for batch in (1, 4):
        for length in (5, 64 if _refuses_long(mixer, dtype) else 130):
            cache = None
            for context in (length, length + 1, length + 2):
                rows = ids(device, 1 if cache is not None else length, batch)
                cache = model(rows, past_key_values=cache, use_cache=True).past_key_values
                held = [x for i in range(len(design.layers)) for state in cache[i].values() for x in _tensors(state)]
                logical = sum(x.numel() * x.element_size() for x in held)
                stored = sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}.values())
                expected = batch * cost(design, context, dtype).kv_cache_bytes
                errors.add(f"bytes, {batch} x {context}", abs(logical / expected - 1), 1e-9)
                errors.add(f"stored, {batch} x {context}", abs(stored / expected - 1), 1e-9)
            errors.note(f"bytes of {batch} x {context}", logical)
    errors.check()


@torch.no_grad()
@pytest.mark.parametrize("mixer", LINEAR)
def test_cpu_and_gpu_give_the_same_logits(mixer: str, device: str, errors: Errors) -> None:
    """The whole stack, norms, convolutions and all, in one process: a CPU in float32 against the GPU in both types."""
    cpu = build(_design(mixer, "hybrid"))
    gpu = copy.deepcopy(cpu).to(device)
    for dtype, bound in DEVICES.items():
        rows = ids(device, 64 if _refuses_long(mixer, dtype) else 200)
        with autocast(rows, dtype == "bfloat16"):
            found = gpu(rows).logits
        errors.add(dtype, relative(found, cpu(rows.cpu()).logits), bound)
    errors.check()
