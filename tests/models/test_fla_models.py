"""Our stack against fla's own models and layers, with the same weights on the same CPU kernels, and a stack of all."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from fla.layers.attn import Attention
from torch import Tensor, nn

from nas.architecture import Architecture, LayerSpec, Routing
from nas.models.softmax import SoftmaxAttention
from tests.models.fla_parity import (
    ALL,
    LAYER_ONLY,
    LAYERS,
    LINEAR,
    MODELS,
    build,
    fla_layer,
    fla_model,
    logits_and_gradients,
    relative,
    sdpa_as_flash_attention,
    stack,
    through_bare_layer,
    to_fla,
    train,
)

EXACT = 1e-5  # the same sums in float32, partly in another order


def _ids(rows: int, length: int) -> Tensor:
    return torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(1))


def _design(mixer: str, form: str) -> Architecture:
    """Two layers without convolutions and one embedding for both ends, or five with full and windowed attention."""
    if form == "hybrid":
        return stack(mixer, mixer, "softmax", mixer, "window")
    layer = LAYERS[mixer].model_copy(update={"conv_size": 0})
    return stack(mixer, mixer, tie_word_embeddings=True).model_copy(update={"layers": (layer, layer)})


def _compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        assert gradient.norm() > 1e-5, name  # a gradient of nothing would compare nothing
        assert relative(found[name], gradient) < EXACT, name


def test_every_linear_mixer_is_compared() -> None:
    assert {*MODELS, *LAYER_ONLY} == set(LINEAR)
    assert not {*MODELS} & {*LAYER_ONLY}


@pytest.mark.parametrize("form", ["pure", "hybrid"])
@pytest.mark.parametrize("mixer", MODELS)
def test_logits_and_gradients_equal_those_of_flas_model(mixer: str, form: str) -> None:
    design, ids = _design(mixer, form), _ids(2, 70)
    ours = build(design).train()
    with sdpa_as_flash_attention():
        theirs = fla_model(design, ours)
        expected, expected_gradients = logits_and_gradients(theirs, dict(theirs.named_parameters()), ids)
    logits, gradients = logits_and_gradients(ours, dict(ours.named_parameters()), ids)
    assert expected.std() > 0.5
    assert relative(logits, expected) < EXACT
    _compare_with_tables(design, gradients, expected_gradients)


def _compare_with_tables(design: Architecture, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    found, table = to_fla(design, found, absent=0), "model.lower_bounds"
    if table in expected:  # rows that no layer reads have no gradient
        assert relative(found.pop(table), expected.pop(table)) < EXACT
    _compare(found, expected)


@torch.no_grad()
@pytest.mark.parametrize("mixer", MODELS)
def test_decoding_equals_that_of_flas_model(mixer: str) -> None:
    design, ids = _design(mixer, "hybrid"), _ids(2, 34)
    ours = build(design)
    with sdpa_as_flash_attention():
        models: list[tuple[nn.Module, list[Tensor]]] = [(ours, []), (fla_model(design, ours), [])]
        for model, pieces in models:
            cache = None
            for part in ids.split([30, 1, 1, 1, 1], 1):
                out = model(part, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                pieces.append(out.logits)
    found, expected = (torch.cat(pieces, 1) for _, pieces in models)
    assert relative(found, expected) < EXACT
    assert relative(found, ours(ids).logits) < EXACT


@pytest.mark.parametrize("mixer", LAYER_ONLY)
def test_logits_and_gradients_equal_those_of_flas_layer(mixer: str) -> None:
    """Mamba-2 meets fla's own forward pass here, in quadratic chunks instead of a linear-attention kernel."""
    design, ids = stack(mixer), _ids(1, 70)
    ours = build(design).train()
    layer = fla_layer(design, ours.model.layers[0].attn)
    assert type(layer).__module__.startswith("fla.layers.")
    names = dict(ours.named_parameters())
    theirs = names | {f"model.layers.0.attn.{name}": p for name, p in layer.named_parameters()}
    expected, expected_gradients = logits_and_gradients(lambda x: through_bare_layer(ours, layer, x), theirs, ids)
    logits, gradients = logits_and_gradients(ours, names, ids)
    assert relative(logits, expected) < EXACT
    _compare(gradients, expected_gradients)


SOFTMAX: dict[str, dict[str, Any]] = {
    "multi-head": {"heads": 4, "head_dim": 16, "rope_theta": 1e4},
    "grouped": {"heads": 4, "head_dim": 16, "kv_heads": 2, "rope_theta": 5e5},
    "multi-query": {"heads": 4, "head_dim": 16, "kv_heads": 1, "rope_theta": 100.0},
    "window": {"heads": 4, "head_dim": 16, "kv_heads": 2, "window": 7, "rope_theta": 1e4},
    "norm": {"heads": 4, "head_dim": 16, "kv_heads": 2, "rope_theta": 1e4, "qk_norm": True},
    "no positions": {"heads": 2, "head_dim": 32, "window": 5},
    "narrow": {"heads": 3, "head_dim": 10, "kv_heads": 1, "rope_theta": 1e4, "qk_norm": True},
}
"""Layers by name; the last two are beyond fla's `Attention`, which always rotates and takes heads of width / heads."""


def _softmax(spec: LayerSpec, dtype: torch.dtype) -> SoftmaxAttention:
    torch.manual_seed(0)
    layer = build(stack("softmax").model_copy(update={"layers": (spec,), "norm_eps": 1e-5})).model.layers[0].attn
    assert isinstance(layer, SoftmaxAttention)
    for name, parameter in layer.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.uniform_(parameter, 0.5, 1.5)
    return layer.to(dtype)


def _plain_attention(layer: SoftmaxAttention, spec: LayerSpec, x: Tensor) -> Tensor:
    """Softmax attention head by head from its definition, the rotation as one of complex numbers."""
    length, size, kv_heads = x.shape[1], spec.head_dim, spec.kv_heads or spec.heads
    angle = torch.zeros(length, size // 2, dtype=torch.float64)
    if spec.rope_theta is not None:
        frequency = torch.tensor([spec.rope_theta ** (-2 * i / size) for i in range(size // 2)], dtype=torch.float64)
        angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency

    def head(projection: str, index: int) -> Tensor:
        y = x @ layer.get_submodule(projection).get_parameter("weight")[index * size : (index + 1) * size].T
        if projection == "v_proj":
            return y
        if spec.qk_norm:
            y = (
                y
                / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()
                * layer.get_parameter(f"{projection[0]}_norm.weight")
            )
        turned = torch.complex(y[..., : size // 2], y[..., size // 2 :]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([turned.real, turned.imag], -1)

    heads = []
    for index in range(spec.heads):
        key = index * kv_heads // spec.heads
        scores = head("q_proj", index) @ head("k_proj", key).mT / size**0.5
        for t in range(length):
            scores[:, t, t + 1 :] = float("-inf")
            if spec.window is not None:
                scores[:, t, : max(0, t + 1 - spec.window)] = float("-inf")
        heads.append(scores.softmax(-1) @ head("v_proj", key))
    return torch.cat(heads, -1) @ layer.o_proj.weight.T


@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax_equals_its_definition(name: str) -> None:
    spec = LayerSpec(mixer="softmax", **SOFTMAX[name])
    layer = _softmax(spec, torch.float64)
    x = torch.randn(2, 20, 64, dtype=torch.float64)
    results = [
        (out, *torch.autograd.grad((out * x.flip(1)).sum(), list(layer.parameters())))
        for out in (layer(x)[0], _plain_attention(layer, spec, x))
    ]
    for found, expected in zip(*results, strict=True):
        assert relative(found, expected) < 1e-12


@pytest.mark.parametrize("name", [name for name in SOFTMAX if name not in ("no positions", "narrow")])
def test_softmax_equals_flas_attention(name: str) -> None:
    spec = LayerSpec(mixer="softmax", **SOFTMAX[name])
    ours, x = _softmax(spec, torch.float32), torch.randn(2, 40, 64)
    with sdpa_as_flash_attention():
        theirs = Attention(
            hidden_size=64, num_heads=spec.heads, num_kv_heads=spec.kv_heads, window_size=spec.window,
            rope_theta=spec.rope_theta, qk_norm=bool(spec.qk_norm), layer_idx=0,
        )  # fmt: skip
        theirs.load_state_dict(ours.state_dict())
        expected = theirs(x)[0]
    found = ours(x)[0]
    assert relative(found, expected) < EXACT
    names = [name for name, _ in ours.named_parameters()]
    gradients = [
        torch.autograd.grad((out * x.flip(1)).sum(), [layer.get_parameter(name) for name in names])
        for out, layer in ((found, ours), (expected, theirs))
    ]
    for one, two in zip(*gradients, strict=True):
        assert relative(one, two) < EXACT


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_stack_of_all_twelve_kinds_trains(optimizer: str) -> None:
    """Every kind of layer in one model with cross-layer value routing: all parameters learn, the loss falls."""
    losses, missing = train(build(stack(*ALL, routing=Routing(kind="clvr"))), optimizer, _ids(2, 72), steps=4)
    assert not missing
    assert all(later < before for before, later in pairwise(losses)), losses
    assert losses[-1] < losses[0] - 0.1
