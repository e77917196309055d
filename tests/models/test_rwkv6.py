"""fla's RWKV-6 layer on our CPU kernels against the layer written out token by token."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nas.models.mixers import build_mixer
from nas.models.modeling import HybridForCausalLM
from nas.models.upstream import Cache

WIDTH = 24


def _disturb(module: Any) -> Any:
    """Random values everywhere: at initialisation bonus, decays and half of the token shift depend on nothing."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def _layer() -> Any:
    layer = {"mixer": "rwkv6", "heads": 2, "head_dim": 6, "expand_v": 2.0, "conv_size": 0}
    return _disturb(build_mixer(layer, WIDTH, 0, 1e-5))


def _written_out(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """arXiv:2404.05892, section 4, with fla's projections: x [B, T, d] -> output, last state [B, H, K, V]."""
    previous, outputs = torch.zeros_like(x[:, 0]), []
    state = x.new_zeros(len(x), 2, 6, 12)
    for token in x.unbind(1):
        delta = previous - token
        mixed = torch.tanh(layer.x_proj[0].linear(token + delta * layer.x_proj[0].mu)).unflatten(-1, (5, -1))
        shift = torch.einsum("bnr,dnr->nbd", mixed, layer.x_proj[2].weight.unflatten(-1, (5, -1)))
        shift = shift + layer.x_bias[:, None]
        projections = (layer.r_proj, layer.w_proj, layer.k_proj, layer.v_proj, layer.g_proj)
        r, w, k, v, g = (p.linear(token + delta * s) for p, s in zip(projections, shift, strict=True))
        r, w, k, v = (y.unflatten(-1, (2, -1)) for y in (r, w, k, v))
        new = k[..., None] * v[..., None, :]
        read = torch.einsum("bhk,bhkv->bhv", r, state + layer.bonus[..., None] * new)
        state = state * torch.exp(-torch.exp(w))[..., None] + new
        normed = F.layer_norm(read, (12,), eps=1e-5).flatten(1) * layer.g_norm.weight + layer.g_norm.bias
        outputs.append(layer.o_proj(normed * F.silu(g)))
        previous = token
    return torch.stack(outputs, 1), state


def _relative(ours: Tensor, reference: Tensor) -> float:
    return float((ours - reference).detach().norm() / reference.detach().norm())


def test_equals_the_layer_written_out() -> None:
    """Output, both states and every gradient, in one call of 70 tokens and in calls of 33, 1 and 36."""
    layer, x = _layer(), torch.randn(2, 70, WIDTH, requires_grad=True)
    expected, state = _written_out(layer, x)
    weights, leaves = torch.randn_like(expected), [x, *layer.parameters()]
    gradients = torch.autograd.grad((expected * weights).sum(), leaves)
    for lengths in ([70], [33, 1, 36]):
        cache = Cache()
        pieces = [layer(part, past_key_values=cache, use_cache=True)[0] for part in x.split(lengths, 1)]
        ours = torch.cat(pieces, 1)
        assert _relative(ours, expected) < 1e-5
        assert _relative(cache[0]["recurrent_state"], state) < 1e-5
        assert torch.equal(cache[0]["conv_state"], x[:, -1])
        for got, want in zip(torch.autograd.grad((ours * weights).sum(), leaves), gradients, strict=True):
            assert _relative(got, want) < 1e-4


@torch.no_grad()
def test_padding_packing_and_the_future(make_model: Callable[..., HybridForCausalLM]) -> None:
    """With weights under which the decays and the token shift depend on the tokens."""
    model, ids = _disturb(make_model("rwkv6", "rwkv6_narrow")), torch.randint(50, (2, 90))
    whole = model(ids).logits
    mask = torch.ones_like(ids)
    mask[0, :21] = 0
    padded = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(padded[0, 21:], model(ids[:1, 21:]).logits[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(padded[1], whole[1], atol=1e-4, rtol=1e-4)
    packed = model(ids[:1], cu_seqlens=torch.tensor([0, 3, 73, 90])).logits
    apart = torch.cat([model(part).logits for part in ids[:1].split([3, 70, 17], 1)], 1)
    torch.testing.assert_close(packed, apart, atol=1e-4, rtol=1e-4)
    changed = ids.clone()
    changed[:, 60:] = (changed[:, 60:] + 1) % 50
    later = model(changed).logits
    torch.testing.assert_close(later[:, :60], whole[:, :60], atol=1e-5, rtol=1e-5)
    assert (later[:, 60:] - whole[:, 60:]).abs().amax((0, 2)).min() > 1e-3


@torch.no_grad()
def test_initialisation_is_fla_s(make_model: Callable[..., HybridForCausalLM]) -> None:
    """Zero bonus and decay projection (so exp(-1) a step), Xavier of gain 2^-2.5 elsewhere; ours for the block."""
    model = make_model("rwkv6", hidden_size=64, initializer_range=0.3)
    mixer: Any = model.model.layers[0].attn
    for zero in (mixer.bonus, mixer.x_bias, mixer.x_proj[0].mu, mixer.w_proj.linear.lora[0].weight):
        assert torch.all(zero == 0)
    up = mixer.w_proj.linear.lora[2].weight  # [32, 64]: orthogonal rows of length .1 sqrt(64 / 32)
    torch.testing.assert_close(up @ up.T, 0.02 * torch.eye(32), atol=1e-6, rtol=0)
    for linear in (mixer.r_proj.linear, mixer.v_proj.linear, mixer.x_proj[0].linear, mixer.x_proj[2], mixer.o_proj):
        expected = 2**-2.5 * (2 / sum(linear.weight.shape)) ** 0.5
        assert linear.weight.std() == pytest.approx(expected, rel=0.1)
    assert model.model.layers[0].mlp.gate_proj.weight.std() == pytest.approx(0.3, rel=0.1)
