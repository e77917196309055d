"""Routing labels in a space: which designs have one, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nas.cost import parameters
from nas.search.records import design_name, facts
from nas.search.sampler import distributions
from search_spaces import SearchSpace, SpaceError
from search_spaces.designs import Fixed, architecture, architectures, candidate, grid

Small = Callable[..., SearchSpace]
ALL = ["none", "clvr", "clvr:4", "cler:scalar", "cler:head", "cler:channel", "cler_h", "self_transform", "wide_ffn"]


def test_every_label_is_a_design_and_a_parameter(small: Small) -> None:
    space = small(backbones=["kda"], ratios=["3:1"], routing=[*ALL, "clvr+linear"])
    assert distributions(space)["routing"].choices == (*ALL, "clvr+linear")  # type: ignore[attr-defined]
    found = {params["routing"]: design for params, design in grid(space)}
    assert list(found) == [*ALL, "clvr+linear"]
    assert {label: design.architecture.routing.label for label, design in found.items()} == {x: x for x in found}
    assert facts(space, found["clvr:4"])["routing"] == "clvr:4"
    assert len({design_name(design.architecture) for design in found.values()}) == len(found)


def test_a_routing_that_a_backbone_cannot_have_is_none(small: Small) -> None:
    space = small(backbones=["gated_deltanet", "gla"], ratios=["3:1"], routing=["clvr", "clvr+linear", "none"])
    kinds = {(design.backbones[0], design.routing.label) for design in architectures(space)}
    assert kinds == {
        ("gated_deltanet", "clvr"),
        ("gated_deltanet", "clvr+linear"),
        ("gated_deltanet", "none"),
        ("gla", "clvr+linear"),
        ("gla", "none"),
    }
    assert len(list(grid(space))) == 5
    params = {"backbone": "gla", "ratio": "3:1", "placement": "interleaved", "kv_groups": 1, "routing": "clvr"}
    design = candidate(space, Fixed({**params, "optimizer": "adamw", "lr_adamw": 1e-3})).architecture
    assert design.routing.kind == "none"


def test_routing_follows_the_layers_that_a_pattern_has_placed(small: Small) -> None:
    space = small(backbones=[["gla", "kda"]], ratios=["pure", [0, 1, 2, 3, 4]], routing=["none", "clvr"])
    labels = {(design.diagram, design.routing.label) for design in architectures(space)}
    assert labels == {("------", "none"), ("------", "clvr"), ("FFFFF-", "none")}
    assert architecture(space, space.backbones[0], (), routing="clvr").routed_layers == (1, 3, 5)


def test_routing_adds_to_matched_parameters_and_a_wider_mlp_is_its_equal(small: Small) -> None:
    space = small(backbones=["kda"])
    plain, clvr, wide = (architecture(space, "kda", (2, 5), routing=x) for x in ("none", "clvr", "wide_ffn"))
    assert plain.intermediate_size == clvr.intermediate_size == wide.intermediate_size
    added = parameters(clvr) - parameters(plain)
    assert added == 4 * 64 * 64  # four KDA layers, values of 64 to a hidden size of 64
    assert parameters(wide) - parameters(plain) == pytest.approx(added, abs=4 * 1.5 * 64)


@pytest.mark.parametrize(
    ("backbones", "routing", "message"),
    [
        (
            ["gla", "retnet"],
            "clvr",
            "routing 'clvr' needs a delta-rule backbone (gated_deltanet, kda, gated_deltanet2, ",
        ),
        (["gla", "retnet"], "cler_h", "this space has gla, retnet; allowed: clvr+linear, which extends CLVR"),
        ([["gla", "retnet"]], "wide_ffn", "routing 'wide_ffn' needs a delta-rule backbone"),
        (["kda"], "clvrr", "routing 'clvrr' is unknown; allowed: none, clvr, cler:scalar"),
        (["kda"], "cler", "routing 'cler' is unknown; allowed: cler:scalar, cler:head, cler:channel"),
        (["kda"], "none:4", "routing 'none:4': rank=4 does not apply to kind='none'"),
        (["kda"], "cler_h+linear", "only a delta rule has a read-out to subtract"),
    ],
)
def test_mistakes(small: Small, backbones: list[object], routing: str, message: str) -> None:
    with pytest.raises(SpaceError) as caught:
        small(backbones=backbones, routing=["none", routing])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_extension_serves_a_space_without_a_delta_rule(small: Small) -> None:
    space = small(backbones=["gla"], ratios=["pure"], routing=["none", "clvr+linear"])
    assert [design.routing.label for design in architectures(space)] == ["none", "clvr+linear"]


def test_cler_needs_values_of_one_size_in_the_proxy_and_at_the_deployment(small: Small) -> None:
    pattern = [["kda", "deltanet"]]
    with pytest.raises(SpaceError, match="'cler:head' fits no backbone of this space: its delta-rule layers differ"):
        small(backbones=pattern, routing=["none", "cler:head"], proxy={"mixers": {"deltanet": {"expand_v": 2}}})
    deployment = {"mixers": {"deltanet": {"heads": 8}}}
    with pytest.raises(SpaceError, match=r"deployment: kda\+deltanet does not fit its sizes: routing 'cler'"):
        small(backbones=pattern, routing=["none", "cler:head"], deployment=deployment)
    space = small(backbones=pattern, routing=["none", "cler:head"])
    assert "cler:head" in {design.routing.label for design in architectures(space)}


def test_a_routing_that_a_shallower_deployment_loses_is_refused(small: Small) -> None:
    backbones = [["gla"] * 5 + ["kda"]]
    assert small(backbones=backbones, ratios=["pure"], routing=["none", "clvr"])
    with pytest.raises(SpaceError, match="deployment: .* needs a delta-rule layer"):
        small(backbones=backbones, ratios=["pure"], routing=["none", "clvr"], deployment={"layers": 4})
