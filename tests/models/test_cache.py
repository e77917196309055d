"""The memory axis: what a real cache holds after prefill and decoding is what nas.cost says, to the byte."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nas.architecture import Architecture
from nas.cost import DType, cost
from nas.models.configuration import HybridConfig
from nas.models.modeling import HybridForCausalLM
from nas.registry import mixers
from tests.models.layouts import LAYOUTS, stack

LENGTHS = (5, 33, 70)
PARTS = {
    "attention_bytes": ("attn_state",),
    "recurrent_bytes": ("recurrent_state",),
    "convolution_bytes": ("conv_state", "ffn_state"),
}


def tensors(state: Any) -> Iterator[Tensor]:
    """Every tensor in one entry of a cache: a tensor, None, or a nest of these."""
    if isinstance(state, Tensor):
        yield state
    elif state is not None:
        for part in state:
            yield from tensors(part)


def check(design: Architecture, cache: Any, context: int, batch: int, dtype: DType) -> None:
    """Each layer and the whole stack: logical bytes by part, then the bytes that the storage holds."""
    total = dict.fromkeys(PARTS, 0)
    for index, layer in enumerate(design.layers):
        expected = cost(design.model_copy(update={"layers": (layer,)}), context, dtype)
        for part, entries in PARTS.items():
            found = [x for entry in entries for x in tensors(cache[index][entry])]
            logical = sum(x.numel() * x.element_size() for x in found)
            where = f"{part} of {layer.canonical()}, {dtype}, {batch} x {context}"
            assert logical == batch * getattr(expected, part), where
            total[part] += logical
            storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found}
            assert sum(storages.values()) == logical, f"held by {where}"
    whole = cost(design, context, dtype)
    assert total == {part: batch * getattr(whole, part) for part in PARTS}
    assert sum(total.values()) == batch * whole.kv_cache_bytes


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", [*mixers(), "all"])
def test_a_real_cache_holds_what_the_cost_says(name: str, dtype: DType) -> None:
    design = stack(*(mixers() if name == "all" else [name]))
    model = HybridForCausalLM(HybridConfig(architecture=design.canonical())).eval().to(getattr(torch, dtype))
    for batch in (1, 4):
        for length in LENGTHS:
            cache, context = None, 0
            for tokens in (length, 1, 1, 20):  # a prompt, two tokens, a second prompt
                ids = torch.randint(50, (batch, tokens))
                cache = model(ids, past_key_values=cache, use_cache=True).past_key_values
                context += tokens
                check(design, cache, context, batch, dtype)


def test_every_mixer_has_several_layouts() -> None:
    assert {name for name in mixers() if len(LAYOUTS.get(name, [])) >= 3} == set(mixers())
