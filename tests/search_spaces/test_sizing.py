"""Sizes of the proxy: matched parameters, matched states, and the sizes of single mixers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nas.cost import parameters
from nas.registry import Dims, get_mixer, linear_mixers
from search_spaces import SearchSpace, SpaceError
from search_spaces.designs import architecture, architectures
from search_spaces.sizing import layer, state_heads

Small = Callable[..., SearchSpace]
EVERY = tuple(range(6))


def full_attention(space: SearchSpace) -> int:
    """Parameters of the multi-head softmax proxy."""
    return parameters(architecture(space, space.backbones[0], EVERY))


@pytest.mark.parametrize("width", [400, 512, 1000])
def test_matched_designs_have_the_parameters_of_full_attention(small: Small, width: int) -> None:
    space = small(backbones=[*linear_mixers(), ["kda", "gla"]], kv_groups=[1, 2], proxy={"intermediate_size": width})
    assert architecture(space, "gla", EVERY).intermediate_size == width
    target = full_attention(space)
    for design in architectures(space):
        assert parameters(design) == pytest.approx(target, rel=0.01)
    assert len({design.intermediate_size for design in architectures(space)}) > 5


def test_matching_leaves_the_deployment_as_given(small: Small) -> None:
    space = small(deployment={"intermediate_size": 3000})
    design = architecture(space, "gated_deltanet", ())
    assert design.intermediate_size != 128
    assert space.deployment.architecture(design).intermediate_size == 3000


def test_free_designs_have_one_mlp(small: Small) -> None:
    space = small(backbones=list(linear_mixers()), sizing={"parameters": "free"})
    assert {design.intermediate_size for design in architectures(space)} == {128}
    assert small().sizing.parameters == "matched"
    assert small().digest != small(sizing={"parameters": "free"}).digest


def test_mixers_larger_than_the_whole_are_refused(small: Small) -> None:
    sizes = {"intermediate_size": 32, "mixers": {"gla": {"heads": 8}}}
    with pytest.raises(SpaceError) as caught:
        small(proxy=sizes)
    message = str(caught.value)
    assert "sizing.parameters=matched: gla has" in message
    assert "allowed: a larger proxy.intermediate_size, smaller proxy.mixers, or free" in message
    with pytest.raises(SpaceError, match=r"matched: gated_deltanet\+gla has"):
        small(backbones=[["gated_deltanet", "gla"]], proxy=sizes)
    assert small(proxy=sizes, sizing={"parameters": "free"})


def test_a_part_of_a_pattern_may_not_be_larger_than_the_whole_either(small: Small) -> None:
    mixers = {"gla": {"heads": 3}, "deltanet": {"heads": 1, "head_dim": 8}}
    fields = {"backbones": [["gla"] * 5 + ["deltanet"]], "proxy": {"intermediate_size": 68, "mixers": mixers}}
    assert small(**fields, ratios=["pure"])
    with pytest.raises(SpaceError, match="matched: gla has"):
        small(**fields, ratios=["pure", [5]])  # in which softmax stands where the small mixer would


@pytest.mark.parametrize("state", [512, 1024, 2048, 4096])
def test_matched_states_are_equal_within_a_hundredth(small: Small, state: int) -> None:
    backbones = [name for name in linear_mixers() if name != "hgrn"]
    space = small(backbones=backbones, sizing={"state": state}, proxy={"intermediate_size": 512})
    for name in backbones:
        one = layer(space, name)
        assert get_mixer(name).recurrent_state(Dims.of(one, 64)) == pytest.approx(state, rel=0.01)
        assert one.head_dim % 8 == 0
    assert parameters(architecture(space, "gla", ())) == pytest.approx(full_attention(space), rel=0.01)


def test_the_state_is_reached_with_heads_near_the_proxys() -> None:
    assert state_heads("gla", 2048, 64, 2, 1.0) == (2, 32)
    assert state_heads("gla", 2048, 64, 2, 2.0) == (1, 32)  # 2 heads of 24 x 48 keep 2304, of 16 x 32 1024
    assert state_heads("gla", 2048, 64, 4, 2.0) == (4, 16)
    assert state_heads("gla", 4096, 64, 2, 1.0) == (1, 64)
    assert state_heads("mamba2", 1024, 64, 4, 1.0) == (4, 16)
    assert state_heads("hgrn2", 2048, 64, 4, 1.0) == (2, 32)  # heads * head size = hidden size
    assert state_heads("hgrn", 64, 64, 2, 1.0) == (2, 32)


def test_a_matched_state_of_mamba2_is_of_its_value_heads(small: Small) -> None:
    one = layer(small(backbones=["mamba2"], proxy={"heads": 4}, sizing={"state": 1024}), "mamba2")
    assert (one.heads, one.value_heads, one.head_dim) == (1, 4, 16)


@pytest.mark.parametrize(
    ("backbone", "state", "proxy", "message"),
    [
        ("hgrn", 1024, {}, "sizing.state=1024: hgrn cannot keep as many elements a layer; the nearest is 64"),
        ("hgrn2", 3000, {}, "sizing.state=3000: hgrn2 cannot keep as many elements a layer; the nearest is 2048"),
        ("gla", 10, {}, "sizing.state=10: gla cannot keep as many elements a layer; the nearest is 64"),
        ("hgrn2", 64, {"hidden_size": 60}, "sizing.state=64: hgrn2 has no heads of a multiple of 8"),
        ("gla", 1024, {"mixers": {"gla": {"heads": 2}}}, "proxy.mixers.gla.heads=2 contradicts sizing.state=1024"),
        ("gla", 1024, {"mixers": {"kda": {"head_dim": 8}}}, "proxy.mixers.kda.head_dim=8 contradicts sizing.state"),
        ("kda", 1024, {"mixers": {"kda": {"value_heads": 8}}}, "proxy.mixers.kda.value_heads=8 contradicts"),
    ],
)
def test_states_that_cannot_be(small: Small, backbone: str, state: int, proxy: dict[str, Any], message: str) -> None:
    with pytest.raises(SpaceError) as caught:
        small(backbones=[backbone], sizing={"state": state}, proxy=proxy)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_softmax_heads_and_value_expansion_go_with_a_state(small: Small) -> None:
    mixers = {"softmax": {"heads": 4, "head_dim": 16}, "gla": {"expand_v": 2}}
    space = small(backbones=["gla"], proxy={"mixers": mixers}, sizing={"state": 4096})
    one = layer(space, "gla")
    assert (one.heads, one.head_dim, one.expand_v) == (2, 32, 2)
    assert layer(space, "softmax").heads == 4


def test_value_heads(small: Small) -> None:
    mixers = {"gated_deltanet": {"heads": 2, "head_dim": 16, "value_heads": 4}}
    deployed = {"mixers": {"gated_deltanet": {"heads": 4, "head_dim": 64, "value_heads": 8}}}
    space = small(backbones=["gated_deltanet"], proxy={"mixers": mixers}, deployment=deployed)
    proxy = architecture(space, "gated_deltanet", ())
    assert (proxy.layers[0].heads, proxy.layers[0].value_heads) == (2, 4)
    large = space.deployment.architecture(proxy).layers[0]
    assert (large.heads, large.head_dim, large.value_heads) == (4, 64, 8)
    with pytest.raises(SpaceError, match=r"deployment\.mixers\.gated_deltanet\.value_heads=8: the proxy has as many"):
        small(backbones=["gated_deltanet"], deployment=deployed)
    with pytest.raises(SpaceError, match=r"proxy\.mixers\.gla\.value_heads=4 does not apply; allowed: conv_size, "):
        small(proxy={"mixers": {"gla": {"value_heads": 4}}})
    with pytest.raises(SpaceError, match="value_heads=3 must be a multiple of heads=2"):
        small(proxy={"mixers": {"gated_deltanet": {"value_heads": 3}}})


def test_mamba2s_heads_are_value_heads_of_one_group(small: Small) -> None:
    space = small(backbones=["mamba2"], proxy={"heads": 4, "head_dim": 16})
    one = layer(space, "mamba2")
    assert (one.heads, one.value_heads, one.head_dim, one.conv_size) == (1, 4, 16, 4)
    sizes = {"mamba2": {"heads": 2, "value_heads": 8, "head_dim": 8}}
    one = layer(small(backbones=["mamba2"], proxy={"mixers": sizes}), "mamba2")
    assert (one.heads, one.value_heads, one.head_dim) == (2, 8, 8)
    large = space.deployment.architecture(architecture(space, "mamba2", ())).layers[0]
    assert (large.heads, large.value_heads) == (1, 16)


def test_rwkv6_has_no_convolution(small: Small) -> None:
    assert layer(small(backbones=["rwkv6"], proxy={"intermediate_size": 512}), "rwkv6").conv_size == 0
    with pytest.raises(
        SpaceError, match=r"proxy\.mixers\.rwkv6\.conv_size=4 does not apply; allowed: expand_v, head_d"
    ):
        small(backbones=["rwkv6"], proxy={"mixers": {"rwkv6": {"conv_size": 4}}})


def test_no_positions_survive_a_store(small: Small) -> None:
    everywhere = small(proxy={"rope_theta": None})
    only_full = small(proxy={"mixers": {"softmax": {"rope_theta": None}}})
    given = small(proxy={"rope_theta": None, "mixers": {"softmax": {"rope_theta": 500000}}})
    for space, theta in ((everywhere, None), (only_full, None), (given, 500000.0), (small(), 10000.0)):
        assert layer(space, "softmax").rope_theta == theta
        again = SearchSpace.model_validate(space.canonical())
        assert again == space
        assert layer(again, "softmax").rope_theta == theta
    with pytest.raises(SpaceError, match=r"proxy\.rope_theta=-1: Input should be greater than 0"):
        small(proxy={"rope_theta": -1})


def test_qk_norm(small: Small) -> None:
    mixers = {"softmax": {"qk_norm": True}, "sliding_window": {"window": 16, "qk_norm": False}}
    space = small(backbones=[["gla", "sliding_window"]], proxy={"mixers": mixers})
    assert (layer(space, "softmax").qk_norm, layer(space, "sliding_window").qk_norm) == (True, None)
    assert layer(small(), "softmax").qk_norm is None
    with pytest.raises(SpaceError, match=r"proxy\.mixers\.gla\.qk_norm=True does not apply"):
        small(proxy={"mixers": {"gla": {"qk_norm": True}}})
