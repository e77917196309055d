"""Cost: the published figures come out of the closed forms. Real caches are compared in tests/models."""

from __future__ import annotations

import pytest

from nas.architecture import Architecture, LayerSpec, Routing, interleaved
from nas.cost import Deployment, HeadSizes, cost, mean_causal_length, parameters

MIB = 2**20
P1 = Deployment(mixers={"gated_deltanet": HeadSizes(heads=8, head_dim=256)})
GDN = LayerSpec(mixer="gated_deltanet", heads=2, head_dim=32, conv_size=4)
FULL = LayerSpec(mixer="softmax", heads=2, head_dim=32, rope_theta=1e4)


def hybrid(layers: int, full: tuple[int, ...], softmax: LayerSpec = FULL, linear: LayerSpec = GDN) -> Architecture:
    return Architecture(
        vocab_size=288,
        hidden_size=64,
        intermediate_size=128,
        layers=tuple(softmax if i in full else linear for i in range(layers)),
    )


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


def test_p2s_state_keys_and_routing() -> None:
    gdn = LayerSpec(mixer="gated_deltanet", heads=4, head_dim=64, value_heads=8, conv_size=4)
    softmax = LayerSpec(mixer="softmax", heads=16, head_dim=64, kv_heads=4, rope_theta=5e5)
    layers = tuple(softmax if (i + 1) % 3 == 0 else gdn for i in range(20))
    design = Architecture(vocab_size=32000, hidden_size=1024, intermediate_size=2816, layers=layers)
    price = cost(design, 1, "bfloat16")
    assert price.recurrent_bytes == 14 * 32768 * 4
    assert price.attention_bytes == 6 * 512 * 2
    routed = design.model_copy(update={"routing": Routing(kind="clvr")})
    assert parameters(routed) - parameters(design) == 7_340_032
    ranked = design.model_copy(update={"routing": Routing(kind="clvr", rank=16)})
    assert parameters(ranked) - parameters(design) == 14 * 16 * (512 + 1024)


def test_grouped_queries_and_windows_shrink_only_the_attention_part() -> None:
    plain = cost(hybrid(4, (1,)), 1000)
    grouped = cost(hybrid(4, (1,), FULL.model_copy(update={"kv_heads": 1})), 1000)
    windowed = cost(hybrid(4, (1,), FULL.model_copy(update={"window": 100})), 1000)
    assert grouped.attention_bytes * 2 == plain.attention_bytes
    assert windowed.attention_bytes * 10 == plain.attention_bytes
    assert grouped.recurrent_bytes == windowed.recurrent_bytes == plain.recurrent_bytes


def test_grouping_is_kept_as_a_ratio_at_the_deployment() -> None:
    proxy = hybrid(4, (3,), FULL.model_copy(update={"kv_heads": 1}))
    assert Deployment().architecture(proxy).kv_heads == 8


def test_hgrn_keeps_its_vector_in_the_models_type() -> None:
    hgrn = LayerSpec(mixer="hgrn", heads=2, head_dim=32)
    assert cost(hybrid(1, (), linear=hgrn), 10, "bfloat16").recurrent_bytes == 64 * 2
    assert cost(hybrid(1, (), linear=hgrn), 10, "float32").recurrent_bytes == 64 * 4


def test_mean_causal_length() -> None:
    assert mean_causal_length(9, None) == 5
    assert mean_causal_length(10, 1) == 1
    assert mean_causal_length(4, 2) == (1 + 2 + 2 + 2) // 4


def test_cache_grows_with_context_and_with_full_layers() -> None:
    sizes = [cost(hybrid(12, tuple(range(k))), 4096).kv_cache_bytes for k in range(13)]
    assert sizes == sorted(sizes)
    contexts = [cost(hybrid(12, (3,)), n).kv_cache_bytes for n in (1, 64, 4096, 2**20)]
    assert contexts == sorted(contexts)
