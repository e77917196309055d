"""Designs: validation, canonical JSON, digests, placements and the map between depths."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from nas.architecture import (
    ROUTINGS,
    Architecture,
    Candidate,
    LayerSpec,
    Recipe,
    Routing,
    derive_seed,
    interleaved,
    place,
    placement_name,
    stretch,
)

GDN = LayerSpec(mixer="gated_deltanet", heads=2, head_dim=32, conv_size=4)
FULL = LayerSpec(mixer="softmax", heads=2, head_dim=32, rope_theta=1e4)
GLA = LayerSpec(mixer="gla", heads=2, head_dim=32)


def stack(layers: int, full: tuple[int, ...]) -> Architecture:
    return Architecture(
        vocab_size=288,
        hidden_size=64,
        intermediate_size=128,
        layers=tuple(FULL if i in full else GDN for i in range(layers)),
    )


@pytest.mark.parametrize(
    ("label", "positions"),
    [(3, (2, 5, 8, 11, 14, 17, 20, 23)), (6, (5, 11, 17, 23)), (12, (11, 23)), (24, (23,))],
)
def test_interleaved_is_p1s_placement(label: int, positions: tuple[int, ...]) -> None:
    assert interleaved(label, 24) == positions
    assert stack(24, positions).placement == "interleaved"


@pytest.mark.parametrize("every", [3, 6, 12])
def test_depth_map_keeps_p1s_ratios(every: int) -> None:
    assert stack(12, interleaved(every, 12)).at(24).full_attention_layers == interleaved(every, 24)


def test_p2s_twenty_layers() -> None:
    assert interleaved(3, 20) == (2, 5, 8, 11, 14, 17)


subsets = st.integers(1, 24).flatmap(
    lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)).map(sorted), st.integers(1, 96))
)


@given(subsets)
def test_stretched_positions_are_distinct_ordered_and_in_range(case: tuple[int, list[int], int]) -> None:
    layers, positions, depth = case
    mapped = stretch(positions, layers, depth)
    assert mapped == sorted(set(mapped))
    assert all(0 <= p < depth for p in mapped)
    assert len(mapped) == (max(1, len(positions) * depth // layers) if positions else 0)
    assert stretch(positions, layers, layers) == list(positions)


@given(subsets)
def test_at_is_the_identity_at_its_own_depth_and_keeps_mixers(case: tuple[int, list[int], int]) -> None:
    layers, positions, depth = case
    design = stack(layers, tuple(positions))
    assert design.at(layers) == design
    assert len(design.at(depth).layers) == depth
    assert set(design.at(depth).layers) <= set(design.layers)


def test_at_repeats_a_pattern_and_stretches_what_has_none() -> None:
    kinds = {"a": GDN, "b": GDN.model_copy(update={"mixer": "gla", "value_heads": None}), "F": FULL}

    def letters(names: str, depth: int) -> str:
        design = stack(len(names), ()).model_copy(update={"layers": tuple(kinds[x] for x in names)})
        return "".join(next(k for k, spec in kinds.items() if spec == layer) for layer in design.at(depth).layers)

    assert letters("aabFaabF", 16) == "aabFaabFaabFaabF"
    assert letters("abF", 6) == "aaFbbF"
    assert letters("aaab", 8) == "aaaaaabb"
    assert letters("aabaab", 4) == "aaba"
    assert letters("aF", 4) == "aFaF"


@given(subsets)
def test_json_round_trip_keeps_the_digest(case: tuple[int, list[int], int]) -> None:
    design = stack(case[0], tuple(case[1]))
    again = Architecture.model_validate_json(design.canonical_json())
    assert again == design
    assert again.digest == design.digest
    assert design.model_copy(update={"vocab_size": 320}).digest != design.digest


def test_digest_is_equal_in_another_process_and_whatever_the_key_order() -> None:
    design = stack(4, (1,))
    shuffled = dict(reversed(design.canonical().items()))
    assert Architecture.model_validate(shuffled).digest == design.digest
    code = (
        "import sys; from nas.architecture import Architecture;"
        "print(Architecture.model_validate_json(sys.stdin.read()).digest)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], input=design.canonical_json(), capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == design.digest


@pytest.mark.parametrize(
    ("positions", "layers", "name"),
    [
        ((), 4, "pure"),
        ((0, 1, 2, 3), 4, "full"),
        ((1, 3), 4, "interleaved"),
        ((0, 1), 4, "early"),
        ((1, 2), 4, "middle"),
        ((2, 3), 4, "late"),
        ((0, 3), 4, "custom"),
    ],
)
def test_placement_names(positions: tuple[int, ...], layers: int, name: str) -> None:
    assert placement_name(positions, layers) == name
    if name in ("early", "middle", "late"):
        assert place(name, len(positions), 2, layers) == positions


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mixer": "gated_delta"}, "did you mean 'gated_deltanet'"),
        ({"mixer": "gla", "window": 8}, "window=8 does not apply to gla"),
        ({"mixer": "softmax", "kv_heads": 3}, "kv_heads=3 must divide heads=4"),
        ({"mixer": "softmax", "conv_size": 4}, "softmax has no short convolution"),
        ({"mixer": "gla", "expand_v": 1.3}, "must be a whole number"),
        ({"mixer": "gla", "expand_v": float("nan")}, "finite"),
        ({"mixer": "gla", "head": 1}, "Extra inputs"),
        ({"mixer": "retnet", "head_dim": 5}, "head_dim=5 must be even for the rotary positions of retnet"),
        ({"mixer": "softmax", "head_dim": 5, "rope_theta": 1e4}, "head_dim=5 must be even"),
        ({"mixer": "gla", "qk_norm": True}, "qk_norm=True does not apply to gla"),
        ({"mixer": "mamba2", "conv_size": 0}, "mamba2 has no layer without its short convolution"),
        ({"mixer": "rwkv6", "conv_size": 4}, "rwkv6 has no short convolution"),
        ({"mixer": "kda", "value_heads": 6}, "value_heads=6 must be a multiple of heads=4"),
    ],
)
def test_bad_layers_are_refused_with_a_reason(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LayerSpec.model_validate({"heads": 4, "head_dim": 16} | fields)


def routed(label: str, *layers: LayerSpec) -> Architecture:
    return Architecture(vocab_size=8, hidden_size=64, intermediate_size=8, layers=layers, routing=Routing.parse(label))


def test_routing_labels_name_the_whole_routing() -> None:
    for label in (
        *ROUTINGS,
        "clvr:16",
        "cler_h:2",
        "self_transform:3",
        "clvr+linear",
        "clvr:4+linear",
        "wide_ffn+linear",
    ):
        assert Routing.parse(label).label == label
    assert Routing.parse("cler:head") == Routing(kind="cler", gamma="head")
    assert Routing.parse("clvr:4+linear") == Routing(kind="clvr", rank=4, scope="linear")
    assert {Routing.parse(label).kind for label in ROUTINGS} == set(get_args(Routing.model_fields["kind"].annotation))


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("clvr2", "routing 'clvr2' is unknown; allowed: none, clvr,"),
        ("clvr:0", "routing 'clvr:0' is unknown"),
        ("cler", "routing 'cler' is unknown; allowed: cler:scalar, cler:head, cler:channel"),
        ("clvr:head", "gamma='head' with kind='clvr'"),
        ("cler:4", "routing 'cler:4' is unknown; allowed: cler:scalar"),
        ("none:4", "rank=4 does not apply to kind='none'"),
        ("cler:head+linear", "only a delta rule has a read-out to subtract; allowed: clvr"),
        ("cler_h+linear", "only a delta rule has a read-out to subtract"),
    ],
)
def test_bad_routings_are_refused_with_a_reason(label: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Routing.parse(label)


def test_routing_needs_a_delta_rule() -> None:
    message = "routing 'clvr' needs a delta-rule layer .*; there is none among softmax, gla; clvr.linear extends CLVR"
    with pytest.raises(ValidationError, match=message):
        routed("clvr", FULL, GLA)
    with pytest.raises(ValidationError, match="needs a delta-rule layer"):
        routed("clvr+linear", FULL)
    assert routed("clvr+linear", FULL, GLA, GDN).routed_layers == (1, 2)
    assert routed("clvr", FULL, GLA, GDN).routed_layers == (2,)
    assert routed("none", FULL, GLA, GDN).routed_layers == ()


def test_cler_adds_values_of_equal_shape() -> None:
    wide, more = (GDN.model_copy(update=x) for x in ({"expand_v": 2.0}, {"value_heads": 4}))
    for other in (wide, more):
        with pytest.raises(ValidationError, match="all delta-rule layers need the same number of value heads"):
            routed("cler:scalar", GDN, other)
        assert routed("cler_h", GDN, other).routed_layers == (0, 1)
    halves = LayerSpec(mixer="deltanet", heads=2, head_dim=32, conv_size=4)
    assert routed("cler:scalar", GDN, FULL, halves).routed_layers == (0, 2)


def test_the_wider_ffn_has_as_many_parameters_as_clvr() -> None:
    """P_l of CLVR has values * hidden; a SwiGLU MLP gains 3 * hidden by a unit of width."""
    for values in (GDN, GDN.model_copy(update={"expand_v": 2.0}), GDN.model_copy(update={"value_heads": 6})):
        design = routed("wide_ffn", values, FULL)
        assert abs(3 * 64 * (design.mlp_size(0) - 8) - design.dims()[0].value * 64) <= 1.5 * 64
        assert design.mlp_size(1) == 8


def test_a_depth_without_routed_layers_is_refused() -> None:
    design = routed("clvr", GDN, FULL)
    assert design.at(4).routed_layers == (0, 2)
    with pytest.raises(ValidationError, match="routing 'clvr' needs a delta-rule layer"):
        design.at(1)


def test_candidates_differ_by_seed_recipe_and_architecture() -> None:
    recipe = Recipe(optimizer="adamw", lr=1e-3, warmup_steps=1, total_steps=10, batch_size=2, sequence_length=8)
    one = Candidate(architecture=stack(4, (1,)), recipe=recipe)
    others = [
        one.model_copy(update={"seed": 1}),
        one.model_copy(update={"architecture": stack(4, (2,))}),
        one.model_copy(update={"recipe": recipe.model_copy(update={"lr": 2e-3})}),
    ]
    assert len({one.digest, *(other.digest for other in others)}) == 4


def test_seeds_are_fixed_functions_of_their_parts() -> None:
    assert derive_seed(0, 1) == 5973285143095172824
    assert len({derive_seed(a, b) for a in range(20) for b in range(20)}) == 400


def test_qk_norm_is_on_or_absent() -> None:
    off = LayerSpec.model_validate(FULL.canonical() | {"qk_norm": False})
    assert off == FULL
    assert off.digest == FULL.digest
    assert FULL.model_copy(update={"qk_norm": True}).digest != FULL.digest


def test_every_routing_that_is_valid_has_a_label_that_parses() -> None:
    assert Routing.parse(Routing(kind="clvr", rank=999_999).label).rank == 999_999
    with pytest.raises(ValueError, match="less than 1000000"):
        Routing(kind="clvr", rank=1_000_000)


def test_a_rank_above_that_of_a_full_projection_is_refused() -> None:
    design = stack(2, ())
    with pytest.raises(ValueError, match="'clvr:65': the rank exceeds that of a full projection; allowed: up to 64"):
        Architecture(**dict(design) | {"routing": Routing(kind="clvr", rank=65)})


@pytest.mark.parametrize("fields", [{"rope_theta": 1e-300}, {"head_dim": 10**400}, {"window": 2**41}, {"heads": 0}])
def test_sizes_out_of_any_reason_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        LayerSpec.model_validate(FULL.canonical() | fields)
