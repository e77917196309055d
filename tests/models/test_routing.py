"""Cross-layer value routing: silent at initialisation, the right value, the same in every mode."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nas.architecture import Architecture, Routing
from nas.cost import parameters
from nas.models.modeling import HybridForCausalLM

Make = Callable[..., HybridForCausalLM]
DELTA = ("gated_deltanet", "deltanet", "gated_deltanet_bare", "deltanet_bare")
STACK = ("gated_deltanet", "softmax", "deltanet", "gla")


def _open(model: HybridForCausalLM) -> HybridForCausalLM:
    torch.manual_seed(5)
    with torch.no_grad():
        for block in model.model.layers:
            if block.route is not None:
                nn.init.normal_(block.route.up.weight, std=0.5)
    return model


@pytest.mark.parametrize("rank", [None, 3])
def test_bit_equal_at_initialisation(rank: int | None, make_model: Make) -> None:
    ids = torch.randint(50, (2, 70))
    plain, routed = make_model(*STACK), make_model(*STACK, clvr=True, rank=rank)
    weights = dict(routed.named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, weights.pop(name)), name
    assert {name.split(".")[3] for name in weights} == {"route"}
    assert torch.equal(plain(ids).logits, routed(ids).logits)
    assert torch.equal(plain.train()(ids).logits, routed.train()(ids).logits)
    down = [p for name, p in weights.items() if "down" in name]
    assert len(down) == (2 if rank else 0)
    assert all(p.std() > 0.1 for p in down)
    again = dict(make_model(*STACK, clvr=True, rank=rank).named_parameters())
    assert all(torch.equal(p, again[name]) for name, p in weights.items())


@pytest.mark.parametrize("rank", [None, 3])
def test_parameters_equal_the_formula(
    rank: int | None, make_model: Make, make_design: Callable[..., Architecture]
) -> None:
    model = make_model(*STACK, clvr=True, rank=rank)
    expected = parameters(make_design(*STACK, routing=Routing(kind="clvr", rank=rank)))
    assert sum(p.numel() for p in model.parameters()) == expected


def _value(mixer: nn.Module, normed: Tensor) -> Tensor:
    """Projection, causal convolution of 4 where there is one, SiLU: written out once more."""
    value = mixer.get_submodule("v_proj")(normed)
    if hasattr(mixer, "v_conv1d"):
        weight = mixer.get_submodule("v_conv1d").weight  # [D, 1, 4]
        padded = F.pad(value, (0, 0, 3, 0))
        value = sum(padded[:, i : i + value.shape[1]] * weight[:, 0, i] for i in range(4))
    return F.silu(value)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", DELTA)
def test_routes_the_value_after_the_whole_layer(kind: str, training: bool, make_model: Make) -> None:
    model = _open(make_model(kind, clvr=True)).train(training)
    block, hidden = model.model.layers[0], torch.randn(2, 70, 32)
    routed = block(hidden)
    value = _value(block.attn, block.attn_norm(hidden))
    block.route, route = None, block.route
    torch.testing.assert_close(routed, block(hidden) + value @ route.up.weight.T, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("rank", [None, 3])
def test_decoding_and_padding(rank: int | None, make_model: Make) -> None:
    model, ids = _open(make_model(*DELTA, "softmax", clvr=True, rank=rank)), torch.randint(50, (2, 40))
    whole, closed = model(ids).logits, make_model(*DELTA, "softmax", clvr=True, rank=rank)(ids).logits
    assert (whole - closed).abs().max() > 0.1
    cache, pieces = None, []
    for part in ids.split([20, 1, 1, 1, 17], 1):
        outputs = model(part, past_key_values=cache, use_cache=True)
        cache = outputs.past_key_values
        pieces.append(outputs.logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=5e-4, rtol=1e-3)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    padded = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(padded[0, 9:], model(ids[:1, 9:]).logits[0], atol=5e-4, rtol=1e-3)
    torch.testing.assert_close(padded[1], whole[1], atol=5e-4, rtol=1e-3)


def test_routing_learns(make_model: Make) -> None:
    model, ids = make_model(*STACK, clvr=True).train(), torch.randint(50, (2, 20))
    model(ids, labels=ids).loss.backward()
    assert all(b.route.up.weight.grad.norm() > 0 for b in model.model.layers if b.route is not None)


def test_a_copy_is_independent(make_model: Make) -> None:
    model, ids = _open(make_model(*STACK, clvr=True)), torch.randint(50, (1, 20))
    twin = copy.deepcopy(model)
    expected = model(ids).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(twin(ids).logits, expected)
