"""Cost: the published figures come out of the closed forms. Real caches are compared in tests/models."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nas.architecture import ROUTINGS, Architecture, LayerSpec, Routing, interleaved
from nas.cost import Deployment, HeadSizes, cost, mean_causal_length, parameters
from nas.registry import linear_mixers, mixers

MIB = 2**20
P1 = Deployment(mixers={"gated_deltanet": HeadSizes(heads=8, head_dim=256)})
GDN = LayerSpec(mixer="gated_deltanet", heads=2, head_dim=32, conv_size=4)
FULL = LayerSpec(mixer="softmax", heads=2, head_dim=32, rope_theta=1e4)
P2_LAYERS = {
    "gated_deltanet": LayerSpec(mixer="gated_deltanet", heads=4, head_dim=64, value_heads=8, conv_size=4),
    "kda": LayerSpec(mixer="kda", heads=4, head_dim=64, value_heads=8, conv_size=4),
    "gated_deltanet2": LayerSpec(mixer="gated_deltanet2", heads=4, head_dim=64, value_heads=8, conv_size=4),
    "deltanet": LayerSpec(mixer="deltanet", heads=4, head_dim=64, expand_v=2, conv_size=4),
}


def stack(
    layers: Sequence[LayerSpec], hidden: int = 64, mlp: int = 128, vocab: int = 288, routing: str = "none"
) -> Architecture:
    return Architecture(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        layers=tuple(layers),
        routing=Routing.parse(routing),
    )


def hybrid(layers: int, full: tuple[int, ...], softmax: LayerSpec = FULL, linear: LayerSpec = GDN) -> Architecture:
    return stack([softmax if i in full else linear for i in range(layers)])


def layer_of(mixer: str, heads: int, head_dim: int) -> LayerSpec:
    """A layer of `heads` heads of `head_dim`; of Mamba-2, as many value heads on one group of keys."""
    entry = mixers()[mixer]
    groups = {"heads": 1, "value_heads": heads} if entry.shared_keys else {"heads": heads}
    return LayerSpec.model_validate({"mixer": mixer, "head_dim": head_dim, "conv_size": entry.conv_size, **groups})


@pytest.mark.parametrize(
    ("every", "at_4k", "at_32k"), [(3, 288, 2080), (6, 168, 1064), (12, 108, 556), (24, 78, 302), (None, 48, 48)]
)
def test_p1s_cache_table_to_the_mebibyte(every: int | None, at_4k: int, at_32k: int) -> None:
    design = P1.architecture(hybrid(24, interleaved(every, 24) if every else ()))
    for context, expected in ((4096, at_4k), (32768, at_32k)):
        price = cost(design, context)
        assert price.attention_bytes + price.recurrent_bytes == expected * MIB
        linear = 24 - len(design.full_attention_layers)
        assert price.convolution_bytes == linear * 48 * 1024
        assert price.kv_cache_bytes == price.attention_bytes + price.recurrent_bytes + price.convolution_bytes


def test_full_attention_at_p1s_size() -> None:
    assert cost(P1.full_attention(), 4096).kv_cache_bytes == 768 * MIB
    assert P1.full_attention_bytes() == 6144 * MIB


def test_p1s_pure_gdn_has_1_466_billion_parameters() -> None:
    assert parameters(P1.architecture(hybrid(24, ()))) == pytest.approx(1.466e9, rel=2e-3)


def test_p1s_ratios_at_the_default_deployment() -> None:
    default = Deployment()
    assert default.kv_cache_ratio(hybrid(24, interleaved(3, 24))) == pytest.approx(0.34, abs=0.005)
    assert default.kv_cache_ratio(hybrid(24, interleaved(4, 24))) == pytest.approx(0.26, abs=0.01)


P1_FLOPS = {  # appendix B, times d^2 / H; KDA and GDN-2, which P1 does not have, as their relatives
    "retnet": 5,
    "mamba2": 5,
    "gla": 7,
    "hgrn2": 7,
    "rwkv6": 7,
    "deltanet": 8,
    "gated_deltanet": 8,
    "kda": 8,
    "gated_deltanet2": 8,
}


@pytest.mark.parametrize("mixer", linear_mixers())
def test_p1s_mixer_flops(mixer: str) -> None:
    d, heads = 2048, 16
    expected = 5 * d if mixer == "hgrn" else P1_FLOPS[mixer] * d * d // heads
    design = stack([layer_of(mixer, heads, d // heads)], hidden=d)
    assert cost(design, 1000).p1_mixer_flops_per_token == expected
    assert cost(design, 100_000).p1_mixer_flops_per_token == expected


def test_p1s_softmax_flops_grow_with_the_context() -> None:
    layer = LayerSpec(mixer="softmax", heads=16, head_dim=128, kv_heads=4)
    assert cost(stack([layer] * 3, hidden=2048), 1000).p1_mixer_flops_per_token == 3 * 2 * 1000 * 2048
    windowed = layer.model_copy(update={"window": 100})
    assert cost(stack([windowed], hidden=2048), 1000).p1_mixer_flops_per_token == 2 * 100 * 2048


def test_the_chunkwise_count_of_kda_is_near_the_count_by_state() -> None:
    """Per head and token, with head size D and chunk C: 6 D^2 + 3 C D + C^2 (papers.md)."""
    head, chunk = 128, 64
    chunkwise = 6 * head**2 + 3 * chunk * head + chunk**2
    design = stack([layer_of("kda", 1, head)], hidden=head)
    assert cost(design, 1).p1_mixer_flops_per_token == pytest.approx(chunkwise, rel=0.04)


@pytest.mark.parametrize("mixer", P2_LAYERS)
def test_p2s_state_keys_and_value_routing(mixer: str) -> None:
    softmax = LayerSpec(mixer="softmax", heads=16, head_dim=64, kv_heads=4, rope_theta=5e5)
    layers = [softmax if (i + 1) % 3 == 0 else P2_LAYERS[mixer] for i in range(20)]

    def design(routing: str = "none") -> Architecture:
        return stack(layers, 1024, 2816, 32000, routing)

    price = cost(design(), 1)
    assert price.recurrent_bytes == 14 * 32768 * 4
    assert price.convolution_bytes == 14 * 4 * (256 + 256 + 512) * 2
    assert price.attention_bytes == 6 * 512 * 2
    plain = price.parameters
    assert parameters(design("clvr")) - plain == 7_340_032
    assert parameters(design("cler_h")) - plain == 7_340_032
    assert parameters(design("clvr:16")) - plain == 14 * 16 * (512 + 1024)
    assert parameters(design("self_transform")) - plain == 14 * 1024 * 1024
    assert abs(parameters(design("wide_ffn")) - parameters(design("clvr"))) <= 14 * 1.5 * 1024
    heads = P2_LAYERS[mixer].value_heads or 4
    gammas = {"scalar": 1, "head": heads, "channel": 512}  # none in the lowest delta-rule layer
    assert {name: parameters(design(f"cler:{name}")) - plain for name in gammas} == {
        name: 13 * size for name, size in gammas.items()
    }
    assert {cost(design(name), 4096).kv_cache_bytes for name in ROUTINGS} == {cost(design(), 4096).kv_cache_bytes}


@pytest.mark.parametrize(
    ("layer", "state", "aux"),
    [  # facts/fla.md: elements of the recurrent state, and of convolutions or shifts, at hidden size 1024
        (LayerSpec(mixer="hgrn", heads=8, head_dim=128), 1024, 0),
        (LayerSpec(mixer="hgrn2", heads=8, head_dim=128), 128 * 1024, 0),
        (LayerSpec(mixer="gla", heads=4, head_dim=128, expand_v=2), 1024**2 // 8, 0),
        (LayerSpec(mixer="rwkv6", heads=4, head_dim=128, expand_v=2), 1024**2 // 8, 1024),
        (LayerSpec(mixer="retnet", heads=8, head_dim=128, expand_v=2), 2 * 1024**2 // 8, 0),
        (LayerSpec(mixer="deltanet", heads=8, head_dim=128, conv_size=4), 8 * 128 * 128, 4 * 3 * 1024),
        (LayerSpec(mixer="kda", heads=8, head_dim=128, conv_size=4), 8 * 128 * 128, 4 * 3 * 1024),
        (LayerSpec(mixer="gated_deltanet2", heads=8, head_dim=128, conv_size=4), 8 * 128 * 128, 4 * 3 * 1024),
        (
            LayerSpec(mixer="gated_deltanet", heads=3, head_dim=256, expand_v=2, conv_size=4),
            3 * 256 * 512,
            4 * (2 * 768 + 1536),
        ),
        (
            LayerSpec(mixer="mamba2", heads=1, head_dim=128, expand_v=0.5, value_heads=32, conv_size=4),
            2 * 1024 * 128,
            4 * (2 * 1024 + 2 * 128),
        ),
    ],
    ids=lambda value: value.mixer if isinstance(value, LayerSpec) else "",
)
def test_states_of_flas_layers_at_width_1024(layer: LayerSpec, state: int, aux: int) -> None:
    price = cost(stack([layer], hidden=1024), 4096)
    item = 2 if layer.mixer == "hgrn" else 4  # HGRN keeps its vector in the model's type
    assert (price.attention_bytes, price.recurrent_bytes, price.convolution_bytes) == (0, state * item, aux * 2)
    single = cost(stack([layer], hidden=1024), 4096, "float32", "bfloat16")
    assert (single.recurrent_bytes, single.convolution_bytes) == (state * (6 - item), aux * 4)


def test_full_attention_keeps_four_kibibytes_a_token_at_width_1024() -> None:
    layer = LayerSpec(mixer="softmax", heads=16, head_dim=64)
    assert cost(stack([layer], hidden=1024), 1).kv_cache_bytes == 4096


def test_flops_of_one_layer_by_hand() -> None:
    matrices = 2 * (288 * 64 + 4 * 64 * 64 + 3 * 64 * 128)
    price = cost(stack([FULL]), 100)
    assert price.flops_per_token == matrices + 4 * 64 * 100
    assert price.training_flops_per_token == 3 * (matrices + 4 * 64 * 50)
    linear = cost(stack([LayerSpec(mixer="retnet", heads=2, head_dim=32)]), 100)
    norm = 2 * 32  # RetNet's output norm counts as parameters do
    assert linear.flops_per_token == 2 * (288 * 64 + 5 * 64 * 64 + 3 * 64 * 128) + norm + 5 * 2 * 32 * 32
    routed = cost(stack([GDN, GDN], routing="cler_h"), 100)
    plain, clvr = cost(stack([GDN, GDN]), 100), cost(stack([GDN, GDN], routing="clvr"), 100)
    assert clvr.flops_per_token - plain.flops_per_token == 2 * 2 * 64 * 64
    assert routed.flops_per_token - clvr.flops_per_token == 2 * 2 * (2 * 32 * 32)  # the read-out at the key


def test_grouped_queries_and_windows_shrink_only_the_attention_part() -> None:
    plain = cost(hybrid(4, (1,)), 1000)
    grouped = cost(hybrid(4, (1,), FULL.model_copy(update={"kv_heads": 1})), 1000)
    windowed = cost(hybrid(4, (1,), FULL.model_copy(update={"window": 100})), 1000)
    assert grouped.attention_bytes * 2 == plain.attention_bytes
    assert windowed.attention_bytes * 10 == plain.attention_bytes
    assert grouped.recurrent_bytes == windowed.recurrent_bytes == plain.recurrent_bytes


def test_a_deployment_keeps_ratios_and_sets_sizes() -> None:
    proxy = hybrid(4, (3,), FULL.model_copy(update={"kv_heads": 1}))
    assert Deployment().architecture(proxy).kv_heads == 8
    mamba = LayerSpec(mixer="mamba2", heads=1, head_dim=16, value_heads=4, conv_size=4)
    deployed = Deployment().architecture(hybrid(2, (), linear=mamba)).layers[0]
    assert (deployed.heads, deployed.head_dim, deployed.value_heads) == (1, 128, 16)
    sizes = Deployment(mixers={"gated_deltanet": HeadSizes(heads=4, value_heads=8), "softmax": HeadSizes(window=512)})
    windowed = hybrid(2, (1,), FULL.model_copy(update={"window": 8}))
    linear, softmax = sizes.architecture(windowed).layers[0], sizes.architecture(windowed).layers[-1]
    assert (softmax.window, softmax.heads, linear.heads) == (512, 16, 4)
    wide = sizes.architecture(hybrid(1, (), linear=GDN.model_copy(update={"value_heads": 4}))).layers[0]
    assert (wide.heads, wide.value_heads) == (4, 8)


def test_mean_causal_length() -> None:
    assert mean_causal_length(9, None) == 5
    assert mean_causal_length(10, 1) == 1
    assert mean_causal_length(4, 2) == (1 + 2 + 2 + 2) // 4


def test_cache_grows_with_context_and_with_full_layers() -> None:
    sizes = [cost(hybrid(12, tuple(range(k))), 4096).kv_cache_bytes for k in range(13)]
    assert sizes == sorted(sizes)
    contexts = [cost(hybrid(12, (3,)), n).kv_cache_bytes for n in (1, 64, 4096, 2**20)]
    assert contexts == sorted(contexts)


def test_a_ratio_that_the_deployment_cannot_have_is_refused() -> None:
    proxy = hybrid(4, (3,), FULL.model_copy(update={"heads": 4, "head_dim": 16, "kv_heads": 1}))
    assert Deployment(heads=8).architecture(proxy).kv_heads == 2
    for heads in (1, 6):
        with pytest.raises(ValueError, match=f"heads={heads} of softmax must be a multiple of kv_groups=4"):
            Deployment(heads=heads).architecture(proxy)
