"""FLOPs: the closed forms against torch's counter on what it counts, and P1's mixer formula against hand arithmetic.

torch.utils.flop_counter sees matrix products and convolutions. We count those with a weight (a parameter) as operand,
which leaves out the kernels' own products: a chunked kernel multiplies more than the recurrence it computes. Scaled
dot-product attention is counted as the full T x T rectangle whether or not it is causal; so is one decoding step after
T tokens times T, which is what `flops_per_token` at context T charges.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count, sdpa_flop_count

from nas.architecture import ROUTINGS, Architecture, LayerSpec, Routing
from nas.cost import cost, mean_causal_length, read_out_layers
from nas.models.configuration import HybridConfig
from nas.models.modeling import HybridForCausalLM
from nas.registry import get_mixer, mixers

aten = torch.ops.aten
EXTRA: dict[str, dict[str, Any]] = {"mamba2": {"heads": 1, "value_heads": 4}, "gla": {"expand_v": 2.0}}


def design(*names: str, **fields: Any) -> Architecture:
    layers = []
    for name in names:
        sizes = {"heads": 4, "head_dim": 32, "conv_size": get_mixer(name).conv_size} | EXTRA.get(name, {})
        layers.append(LayerSpec(mixer=name, **sizes))
    return Architecture(**{"vocab_size": 256, "hidden_size": 128, "intermediate_size": 320, "layers": layers} | fields)


def build(architecture: Architecture) -> HybridForCausalLM:
    return HybridForCausalLM(HybridConfig(architecture=architecture.canonical())).eval()


class Counts:
    """FLOPs of products with a weight, and of attention, while `counting` runs."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.products = 0
        self.attention = 0

    def product(self, a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
        """a [.., M, K] times b [.., K, N]."""
        flops = 2 * a.numel() * b.shape[-1] if self._weight(a) or self._weight(b) else 0
        self.products += flops
        return flops

    def convolution(self, x: Tensor, w: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
        flops: int = conv_flop_count(x.shape, w.shape, out_val.shape)
        self.products += flops
        return flops

    def scores(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
        flops: int = sdpa_flop_count(q.shape, k.shape, v.shape)
        self.attention += flops
        return flops

    def _weight(self, x: Tensor) -> bool:
        return x.untyped_storage().data_ptr() in self.weights


def raw(method: Any) -> Any:
    def formula(*args: Any, **kwargs: Any) -> int:
        return int(method(*args, **kwargs))

    formula._get_raw = True
    return formula


@contextmanager
def counting(model: nn.Module) -> Iterator[Counts]:
    counts = Counts(model)
    mapping = {
        aten.mm: raw(counts.product),
        aten.bmm: raw(counts.product),
        aten.addmm: raw(lambda bias, a, b, *args, **kwargs: counts.product(a, b)),
        aten.convolution: raw(counts.convolution),
        # the counter of torch 2.13 does not know the CPU's kernel
        aten._scaled_dot_product_flash_attention_for_cpu: raw(counts.scores),
    }
    with FlopCounterMode(display=False, custom_mapping=mapping):
        yield counts


def products_per_token(architecture: Architecture) -> int:
    """2 * matrices of nas.cost: its FLOPs without what grows with the context or works on the recurrent state."""
    price = cost(architecture, 1)
    softmax = cost(architecture, 2).flops_per_token - price.flops_per_token
    linear = price.p1_mixer_flops_per_token - softmax // 2
    states = [layer.entry.recurrent_state(x) for layer, x in zip(architecture.layers, architecture.dims(), strict=True)]
    return price.flops_per_token - softmax - linear - sum(2 * states[i] for i in read_out_layers(architecture))


@torch.no_grad()
@pytest.mark.parametrize("name", mixers())
def test_projections_mlp_and_head(name: str) -> None:
    architecture = design(name, name)
    model = build(architecture)
    with counting(model) as counts:
        model(torch.randint(256, (2, 70)), use_cache=False)
    assert counts.products == pytest.approx(2 * 70 * products_per_token(architecture), rel=0.05)


@torch.no_grad()
@pytest.mark.parametrize("label", ROUTINGS)
def test_routing(label: str) -> None:
    """Delta-rule layers over one of softmax: what a routing adds is in the count as it is in the cost."""
    plain = design("gated_deltanet", "softmax", "deltanet")
    routed = design("gated_deltanet", "softmax", "deltanet", routing=Routing.parse(label))
    added = []
    for architecture in (plain, routed):
        model = build(architecture)
        with counting(model) as counts:
            model(torch.randint(256, (1, 70)), use_cache=False)
        assert counts.products == pytest.approx(70 * products_per_token(architecture), rel=0.05)
        added.append(counts.products)
    expected = 70 * (products_per_token(routed) - products_per_token(plain))
    assert added[1] - added[0] == pytest.approx(expected, rel=0.05, abs=added[0] / 1000)  # CLER adds gains, no matrix


def test_read_outs() -> None:
    """A read-out of a state of K x V at a key is 2 K V; the residual of CLER's last layer has no taker."""
    names = ("gated_deltanet", "softmax", "deltanet", "gla")
    plain = cost(design(*names), 64).flops_per_token
    for label, parameters, count in (("cler:scalar", 1, 1), ("cler:channel", 128, 1), ("cler_h", 2 * 128 * 128, 2)):
        routed = cost(design(*names, routing=Routing.parse(label)), 64).flops_per_token
        assert routed - plain == 2 * parameters + count * 2 * (4 * 32 * 32), label


def test_training_is_three_forward_passes() -> None:
    """Plain matrix products (no batched ones, so no kernel's): one forward, two backward."""
    architecture = design("softmax", "gated_deltanet", "softmax")
    model, ids = build(architecture).train(), torch.randint(256, (2, 70))
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids).loss.backward()
    counts = counter.get_flop_counts()["Global"]
    assert counts[aten.mm] == pytest.approx(3 * 2 * 70 * products_per_token(architecture), rel=0.05)


@torch.no_grad()
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 24, 200])
def test_softmax_scores(kv_heads: int, window: int | None) -> None:
    layer = LayerSpec(mixer="softmax", heads=4, head_dim=32, kv_heads=kv_heads, window=window, rope_theta=1e4)
    architecture = design(layers=(layer, layer))
    model, length, products = build(architecture), 70, products_per_token(architecture)
    with counting(model) as counts:
        cache = model(torch.randint(256, (1, length)), use_cache=True).past_key_values
    rectangle = 2 * 4 * 4 * 32 * length * length  # layers, products and factors 2, heads, head size
    assert counts.attention == rectangle
    if window is None:
        assert counts.attention == length * (cost(architecture, length).flops_per_token - products)
    causal = cost(architecture, length).training_flops_per_token // 3 - products
    assert causal * length == rectangle * mean_causal_length(length, window) // length
    with counting(model) as counts:
        model(torch.randint(256, (1, 1)), past_key_values=cache, use_cache=True)
    assert counts.attention == cost(architecture, length + 1).flops_per_token - products


# arXiv:2507.06457, appendix B, at hidden size d = 2048, H = 16 heads and L = 4096 tokens; a token and a layer.
P1 = {
    "softmax": 16_777_216,  # 2 L d
    "hgrn": 10_240,  # 5 d
    "retnet": 1_310_720,  # 5 d^2 / H
    "mamba2": 1_310_720,
    "gla": 1_835_008,  # 7 d^2 / H
    "hgrn2": 1_835_008,
    "rwkv6": 1_835_008,
    "deltanet": 2_097_152,  # 8 d^2 / H
    "gated_deltanet": 2_097_152,
    "kda": 2_097_152,  # not in P1: charged as the delta rule
    "gated_deltanet2": 2_097_152,
}


@pytest.mark.parametrize("name", mixers())
def test_p1s_mixer_formula(name: str) -> None:
    conv = get_mixer(name).conv_size
    groups = {"heads": 1, "value_heads": 16} if get_mixer(name).shared_keys else {"heads": 16}
    layers = (LayerSpec(mixer=name, head_dim=128, conv_size=conv, **groups),) * 3
    assert cost(design(hidden_size=2048, layers=layers), 4096).p1_mixer_flops_per_token == 3 * P1[name]


def test_p1s_mixer_formula_at_its_1_3b_hybrid() -> None:
    """24 layers, 3:1 by P1's label: 8 softmax layers and 16 of GDN with 8 heads of 256."""
    linear = LayerSpec(mixer="gated_deltanet", heads=8, head_dim=256, conv_size=4)
    softmax = LayerSpec(mixer="softmax", heads=16, head_dim=128)
    architecture = design(hidden_size=2048, layers=(linear, linear, softmax) * 8)
    assert cost(architecture, 4096).p1_mixer_flops_per_token == 8 * 16_777_216 + 16 * 4_194_304
