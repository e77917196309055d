"""Backbones of one mixer and of a pattern of mixers, windows among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nas.search.records import design_name, facts
from nas.search.sampler import distributions
from search_spaces import SearchSpace, SpaceError
from search_spaces.designs import Fixed, architecture, architectures, baselines, candidate, grid, labelled_baselines

Small = Callable[..., SearchSpace]
WINDOW = {"mixers": {"sliding_window": {"window": 16}}}


def mixers(space: SearchSpace, backbone: Any, full: tuple[int, ...] = ()) -> list[str]:
    return [layer.mixer for layer in architecture(space, backbone, full).layers]


def test_a_pattern_repeats_over_the_layers_that_are_not_full_attention(small: Small) -> None:
    space = small(backbones=[["gated_deltanet", "gla"], ["kda", "kda", "retnet"]])
    two, three = space.backbones
    assert mixers(space, two) == ["gated_deltanet", "gla"] * 3
    assert mixers(space, two, (2, 5)) == ["gated_deltanet", "gla", "softmax", "gated_deltanet", "gla", "softmax"]
    assert mixers(space, three, (0,)) == ["softmax", "kda", "kda", "retnet", "kda", "kda"]
    assert architecture(space, two, (2, 5)).backbones == ("gated_deltanet", "gla")


def test_a_pattern_keeps_its_shares_at_the_deployment(small: Small) -> None:
    space = small(backbones=[["gated_deltanet", "gla"]])
    deployed = space.deployment.architecture(architecture(space, space.backbones[0], (2, 5)))
    assert len(deployed.layers) == 24
    assert deployed.full_attention_layers == (2, 5, 8, 11, 14, 17, 20, 23)
    linear = [layer.mixer for layer in deployed.layers if not layer.is_softmax]
    assert linear.count("gla") == linear.count("gated_deltanet") == 8


def test_parameters_and_tables_name_a_pattern_by_its_label(small: Small) -> None:
    space = small(backbones=["gla", ["kda", "kda", "sliding_window"]], proxy=WINDOW)
    assert distributions(space)["backbone"].choices == ("gla", "kda+kda+sliding_window")  # type: ignore[attr-defined]
    found = {params["backbone"]: design for params, design in grid(space) if params["ratio"] == "pure"}
    assert found["kda+kda+sliding_window"].architecture.diagram == "--w--w"
    params = {"backbone": "kda+kda+sliding_window", "ratio": "3:1", "placement": "interleaved", "kv_groups": 1}
    params["routing"] = "none"
    design = candidate(space, Fixed({**params, "optimizer": "adamw", "lr_adamw": 1e-3}))
    assert design_name(design.architecture) == "2 Kimi Delta Attention + SWA16 3:1"
    known = facts(space, design)
    assert (known["backbones"], known["diagram"]) == (["kda"], "--Fw-F")
    assert known["deployed_diagram"] == space.deployment.architecture(design.architecture).diagram
    assert [known["deployed_diagram"].count(kind) for kind in "F-w"] == [8, 12, 4]


def test_a_window_is_softmax_with_the_proxys_window_and_the_deployments(small: Small) -> None:
    sizes = {"softmax": {"heads": 4, "head_dim": 16}, "sliding_window": {"window": 16, "rope_theta": None}}
    fields: dict[str, Any] = {"backbones": [["gla", "sliding_window"]], "proxy": {"mixers": sizes}, "kv_groups": [2]}
    space = small(**fields)
    design = architecture(space, space.backbones[0], (5,), kv_groups=2)
    window, full = design.layers[1], design.layers[5]
    assert (window.mixer, window.heads, window.head_dim, window.window, window.kv_heads) == ("softmax", 4, 16, 16, 2)
    assert (window.rope_theta, full.rope_theta) == (None, 10000.0)
    assert (full.window, full.kv_heads) == (None, 2)
    assert design.full_attention_layers == (5,)
    assert {layer.window for layer in space.deployment.architecture(design).layers} == {None, 16}
    wide = small(**fields, deployment={"layers": 6, "mixers": {"softmax": {"window": 2048}}})
    deployed = wide.deployment.architecture(design)
    assert [layer.window for layer in deployed.layers] == [None, 2048, None, 2048, None, None]
    keys = 2 * 8 * 128 * 2  # bytes a token: keys and values of 8 KV heads in bfloat16
    assert wide.deployment.cost(design).attention_bytes == keys * (32768 + 2 * 2048)


def test_kv_groups_are_asked_for_wherever_a_softmax_layer_is(small: Small) -> None:
    space = small(backbones=["gla", ["gla", "sliding_window"]], ratios=["pure"], kv_groups=[1, 2], proxy=WINDOW)
    asked = [(params["backbone"], params.get("kv_groups")) for params, _ in grid(space)]
    assert asked == [("gla", None), ("gla+sliding_window", 1), ("gla+sliding_window", 2)]
    assert [design_name(design) for design in architectures(space)] == [
        "GLA pure",
        "GLA + SWA16 pure",
        "GLA + SWA16 pure GQA2",
    ]


def test_baselines_are_full_attention_and_every_backbone_pure(small: Small) -> None:
    space = small(grid=False, backbones=["gla", ["gla", "kda"]], kv_groups=[2])
    full, gla, both = labelled_baselines(space)
    assert full[0] == {}
    assert full[1].architecture.kv_heads == 1  # the space has no full attention with more
    assert gla[0] == {"backbone": "gla", "ratio": "pure", "optimizer": "adamw", "lr_adamw": 1e-3}
    assert both[0]["backbone"] == "gla+kda"
    assert both[1].architecture.backbones == ("gla", "kda")
    assert [found for _, found in (full, gla, both)] == baselines(space)


def test_a_pattern_that_a_stack_cuts_short_makes_no_design_twice(small: Small) -> None:
    space = small(backbones=["gla", ["gla", "gla", "kda"]], ratios=[[0, 1, 2, 5]])
    assert len(architectures(space)) == len(list(grid(space))) == 1


@pytest.mark.parametrize(
    ("backbones", "message"),
    [
        (["sliding_window"], "backbones: sliding_window alone is no backbone; allowed: a pattern such as"),
        ([["sliding_window", "sliding_window"]], "has no linear mixer; allowed: patterns with one at least of"),
        ([["gla", "softmax"]], "backbones: 'softmax' in a pattern is unknown"),
        ([["gla", "kdaa"]], "'kdaa' in a pattern is unknown; did you mean 'kda'?"),
        ([["gla", "gla"]], "['gla', 'gla'] repeats itself; a pattern repeats anyway: give gla"),
        ([["gla", "kda"] * 2], "repeats itself; a pattern repeats anyway: give [gla, kda]"),
        ([["gla"]], "['gla'] is a pattern of one name; give gla"),
        ([[]], "[] has no linear mixer"),
        ([["gla"] * 6 + ["kda"]], "has 7 names; proxy.layers=6 has no room for them"),
        ([["gla", "kda"], ["gla", "kda"]], "holds a value twice"),
        ([["gla", "sliding_window"]], "proxy.mixers.sliding_window.window is missing"),
        ([3], "backbones.0=3"),
    ],
)
def test_mistakes_in_backbones(small: Small, backbones: list[Any], message: str) -> None:
    with pytest.raises(SpaceError) as caught:
        small(backbones=backbones)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("window", "deployment", "message"),
    [
        ({"softmax": {"window": 8}}, {}, "proxy.mixers.softmax.window=8 does not apply; allowed: head_dim, heads, qk"),
        ({"gla": {"window": 8}}, {}, "proxy.mixers.gla.window=8 does not apply; allowed: conv_size, expand_v, head"),
        ({"sliding_window": {"window": 8, "heads": 4}}, {}, "proxy.mixers.sliding_window.heads=4 does not apply"),
        (
            {"sliding_window": {"window": 64}},
            {},
            "window=64 reaches over all of proxy.sequence_length=64; allowed",
        ),
        ({}, {"softmax": {"window": 8}}, "deployment.mixers.softmax.window=8 applies to softmax where backbones use"),
        ({}, {"gla": {"window": 8}}, "deployment.mixers.gla.window=8 applies to softmax"),
    ],
)
def test_mistakes_in_windows(small: Small, window: dict[str, Any], deployment: dict[str, Any], message: str) -> None:
    with pytest.raises(SpaceError) as caught:
        small(proxy={"mixers": window}, deployment={"mixers": deployment})
    assert message in str(caught.value)
