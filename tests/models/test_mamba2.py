"""Our Mamba-2 forward against fla's slow one, with the same weights, on a CPU."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nas.models.mixers import build_mixer
from nas.models.modeling import HybridForCausalLM
from nas.models.upstream import Cache

LAYOUTS = {
    "one group": {"heads": 1, "value_heads": 4, "head_dim": 16, "expand_v": 0.5, "conv_size": 4},
    "two groups": {"heads": 2, "value_heads": 4, "head_dim": 8, "expand_v": 1.0, "conv_size": 3},
    "a group a head": {"heads": 3, "head_dim": 8, "expand_v": 2.0, "conv_size": 1},
}
WIDTH = 20  # no multiple of any layout's values
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def _layer(layout: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    layer: Any = build_mixer({"mixer": "mamba2", **layout}, WIDTH, 0, 1e-5)
    with torch.no_grad():
        for parameter in (layer.D, layer.norm.weight):
            parameter.normal_()
    layer.act = F.silu  # what the slow path calls; fla puts a Triton kernel there
    layer.chunk_size = 16
    return layer


def _relative(ours: Tensor, reference: Tensor) -> float:
    return float((ours - reference).detach().norm() / reference.detach().norm())


def _by_steps(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """fla's decoding from an empty state: outputs, convolution state [B, D, W] and recurrent state [B, H, P, N]."""
    convolution = x.new_zeros(x.shape[0], layer.conv_dim, layer.conv_kernel_size)
    state = x.new_zeros(x.shape[0], layer.num_heads, layer.head_dim, layer.ssm_state_size)
    outputs = []
    for token in x.split(1, 1):
        last = {"conv_state": convolution, "recurrent_state": state}
        o, convolution, state = layer.torch_forward(token, last, True)
        outputs.append(o)
    return torch.cat(outputs, 1), convolution, state


@layouts
def test_equals_the_slow_decoding_from_the_first_token(layout: dict[str, Any]) -> None:
    """Outputs, both states and all gradients over 70 tokens, more than one chunk."""
    layer, x = _layer(layout), torch.randn(2, 70, WIDTH, requires_grad=True)
    cache = Cache()
    ours = layer(x, past_key_values=cache, use_cache=True)[0]
    slow, convolution, state = _by_steps(layer, x)
    assert _relative(ours, slow) < 1e-5
    assert _relative(cache[0]["recurrent_state"].mT, state) < 1e-5
    assert cache[0]["recurrent_state"].dtype == torch.float32
    assert torch.allclose(cache[0]["conv_state"], convolution, atol=1e-6)
    weights, leaves = torch.randn_like(slow), [x, *layer.parameters()]
    gradients = [torch.autograd.grad((o * weights).sum(), leaves) for o in (ours, slow)]
    for got, want in zip(*gradients, strict=True):
        assert _relative(got, want) < 1e-4


@pytest.mark.parametrize("name", ["one group", "a group a head"])
def test_equals_the_slow_prefill(name: str) -> None:
    """Not with two groups for four heads: there fla 0.6 gives the heads groups 0 1 0 1, in decoding 0 0 1 1."""
    layer, x = _layer(LAYOUTS[name]), torch.randn(2, 70, WIDTH)
    slow = layer.torch_forward(x)[0]
    assert _relative(layer(x)[0], slow) < 1e-5
    with torch.no_grad():
        assert _relative(layer(x)[0], slow) < 1e-5


@torch.no_grad()
@layouts
def test_a_slow_step_continues_ours(layout: dict[str, Any]) -> None:
    layer, x = _layer(layout), torch.randn(2, 31, WIDTH)
    cache = Cache()
    layer(x[:, :30], past_key_values=cache, use_cache=True)
    ours = {name: cache[0][name].clone() for name in ("conv_state", "recurrent_state")}
    last = {"conv_state": ours["conv_state"], "recurrent_state": ours["recurrent_state"].mT}
    slow, convolution, state = layer.torch_forward(x[:, 30:], last, True)
    assert _relative(layer(x[:, 30:], past_key_values=cache, use_cache=True)[0], slow) < 1e-5
    assert _relative(cache[0]["recurrent_state"].mT, state) < 1e-5
    assert torch.allclose(cache[0]["conv_state"], convolution, atol=1e-6)


@layouts
def test_half_precision(layout: dict[str, Any]) -> None:
    layer, x = _layer(layout), torch.randn(1, 70, WIDTH)
    exact, half = layer(x)[0], layer.bfloat16()(x.bfloat16())[0]
    assert half.dtype == torch.bfloat16
    assert _relative(half.float(), exact) < 3e-2


@torch.no_grad()
def test_packed_sequences_are_separate(make_model: Callable[..., HybridForCausalLM]) -> None:
    model, ids = make_model("mamba2", "mamba2_one_group"), torch.randint(50, (1, 90))
    packed = model(ids, cu_seqlens=torch.tensor([0, 3, 73, 90])).logits
    apart = torch.cat([model(part).logits for part in ids.split([3, 70, 17], 1)], 1)
    torch.testing.assert_close(packed, apart, atol=1e-5, rtol=1e-5)


def test_only_fla_s_notes_on_its_own_forward_are_silenced(caplog: pytest.LogCaptureFixture) -> None:
    _layer(LAYOUTS["one group"])
    logging.getLogger("fla.layers.mamba2").warning("another message")
    assert [record.getMessage() for record in caplog.records] == ["another message"]
