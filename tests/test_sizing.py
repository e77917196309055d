"""Matched parameters, the full-attention model beside a design, and the context at which a design breaks even."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nas.architecture import Architecture, LayerSpec
from nas.cost import break_even_context, cache_bytes, cost, full_attention, match_parameters, parameters
from nas.registry import linear_mixers
from tests.test_cost import FULL, GDN, hybrid, layer_of, stack

SIZES = [(64, 4, 2, 256, 288), (256, 12, 4, 512, 288), (1024, 20, 16, 2816, 32000), (2048, 24, 16, 5632, 32000)]
"""Hidden size, layers, heads, width of the MLPs, vocabulary."""


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"width {size[0]}")
@pytest.mark.parametrize("routing", ["none", "clvr+linear", "wide_ffn+linear"])
def test_backbones_are_matched_to_one_percent(size: tuple[int, int, int, int, int], routing: str) -> None:
    hidden, layers, heads, mlp, vocab = size
    softmax = layer_of("softmax", heads, hidden // heads)
    target = parameters(stack([softmax] * layers, hidden, mlp, vocab))
    found = []
    for mixer in linear_mixers():
        linear = layer_of(mixer, heads, hidden // heads)
        for every in (1, 4):
            mixed = [softmax if every > 1 and i % every == every - 1 else linear for i in range(layers)]
            design = match_parameters(stack(mixed, hidden, mlp, vocab, routing), target)
            found.append(parameters(design))
            assert found[-1] == pytest.approx(target, rel=5e-3), mixer
            assert design.model_copy(update={"intermediate_size": mlp}) == stack(mixed, hidden, mlp, vocab, routing)
    assert max(found) <= 1.01 * min(found)


@given(st.integers(4, 24), st.integers(1, 24), st.integers(1, 2**14), st.floats(1.2, 50))
def test_the_granularity_is_the_coarsest_that_stays_within_half_a_percent(
    eighths: int, layers: int, mlp: int, times: float
) -> None:
    hidden = 8 * eighths
    design = stack([layer_of("softmax", 1, hidden)] * layers, hidden, mlp)
    unit = 3 * hidden * layers
    target = int(times * parameters(match_to(design, 64)))
    matched = match_parameters(design, target)
    step = max(n for n in (1, 2, 4, 8, 16, 32, 64) if n == 1 or n * unit <= target / 100)
    assert matched.intermediate_size % step == 0
    assert abs(parameters(matched) - target) <= step * unit / 2


def match_to(design: Architecture, width: int) -> Architecture:
    return design.model_copy(update={"intermediate_size": width})


def test_a_target_that_leaves_no_mlp_is_refused_with_one_that_does() -> None:
    design = hybrid(4, (3,))
    outside = parameters(design) - 3 * 64 * 4 * 128
    with pytest.raises(ValueError, match=f"parameters={outside} cannot be matched: {outside} stand outside") as refused:
        match_parameters(design, outside)
    enough = outside + 64 * 3 * 64 * 4
    assert f"such as {enough} " in str(refused.value)
    assert match_parameters(design, enough).intermediate_size == 64


def test_break_even_by_hand() -> None:
    """Three GDN layers keep 2 heads x 32 x 32 in float32 and 4 x 192 in bfloat16, 9728 bytes each; a full one 256 bytes
    a token: 3 x 9728 + 256 c <= 4 x 256 c from c = 38 on."""
    design, reference = hybrid(4, (3,)), hybrid(4, (0, 1, 2, 3))
    assert break_even_context(design, reference) == 38
    assert cost(design, 38).kv_cache_bytes == cost(reference, 38).kv_cache_bytes
    assert break_even_context(design, reference, "float32") == 22  # (8192 + 3072) / 512
    assert break_even_context(reference, reference) == 1


def test_break_even_with_windows() -> None:
    reference = hybrid(4, (0, 1, 2, 3))
    pure = hybrid(4, ())
    assert break_even_context(pure, reference) == 38  # 4 x 9728 / 1024

    def windows(size: int) -> Architecture:
        return hybrid(4, (0, 1, 2, 3), FULL.model_copy(update={"window": size}))

    assert break_even_context(pure, windows(38)) == 38
    assert break_even_context(pure, windows(37)) is None
    assert break_even_context(reference, windows(37)) == 1
    mixed = stack([GDN, FULL.model_copy(update={"window": 100}), FULL, FULL])
    assert break_even_context(mixed, reference) == 38  # 9728 / 256, before the window is full
    small = stack([GDN, FULL.model_copy(update={"window": 10}), FULL, FULL])
    assert break_even_context(small, reference) == 24  # 9728 + 2560 <= 512 c
    assert break_even_context(hybrid(1, (0,)), hybrid(1, (0,), FULL.model_copy(update={"kv_heads": 1}))) is None


LAYERS = st.one_of(
    st.just(GDN),
    st.just(layer_of("hgrn", 2, 32)),
    st.builds(
        lambda heads, window: LayerSpec(mixer="softmax", heads=2, head_dim=32, kv_heads=heads, window=window),
        st.sampled_from([1, 2]),
        st.none() | st.integers(1, 90),
    ),
)


@given(st.lists(LAYERS, min_size=3, max_size=3), st.lists(LAYERS, min_size=3, max_size=3))
def test_break_even_is_the_first_context_of_a_scan(ours: list[LayerSpec], theirs: list[LayerSpec]) -> None:
    design, reference = stack(ours), stack(theirs)
    scan = (c for c in range(1, 400) if sum(cache_bytes(design, c)) <= sum(cache_bytes(reference, c)))
    assert break_even_context(design, reference) == next(scan, None)


def test_the_full_attention_model_beside_a_design() -> None:
    grouped = LayerSpec(mixer="softmax", heads=4, head_dim=32, kv_heads=2, window=8, rope_theta=1e4)
    reference = full_attention(stack([GDN, GDN, grouped], routing="clvr"))
    assert reference.diagram == "FFF"
    assert reference.routing.kind == "none"
    assert cost(reference, 10).kv_cache_bytes == 3 * 2 * 4 * 32 * 10 * 2
    assert cost(full_attention(stack([GDN, GDN])), 10).kv_cache_bytes == 2 * 2 * 64 * 10 * 2
