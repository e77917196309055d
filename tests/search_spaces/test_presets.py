"""The presets that ship: what each is there for."""

from __future__ import annotations

import pytest

from nas.architecture import Routing
from nas.cost import parameters
from nas.registry import linear_mixers
from search_spaces import load_space, preset_names
from search_spaces.designs import architecture, architectures, baselines, count, grid


def test_presets() -> None:
    assert preset_names() == ["cpu-demo", "hybrid-gpu", "p1-grid", "p2-grid"]
    for name in preset_names():
        space = load_space(name)
        assert space.name == name
        assert space.description
        assert type(space).model_validate(space.canonical()).digest == space.digest


@pytest.mark.parametrize("name", preset_names())
def test_their_proxies_have_the_parameters_of_full_attention(name: str) -> None:
    space = load_space(name)
    target = parameters(architecture(space, space.backbones[0], tuple(range(space.proxy.layers))))
    for design in architectures(space):
        plain = design.model_copy(update={"routing": Routing()})
        assert parameters(plain) == pytest.approx(target, rel=0.01)


def test_cpu_demo_is_as_small_as_without_matching() -> None:
    """Its pure stacks are what most trials resemble: MLPs of about twice the hidden size, as when they were all 128."""
    space = load_space("cpu-demo")
    assert space.backbones == ("gated_deltanet", "deltanet", "gla", "retnet")
    widths = [architecture(space, backbone, ()).intermediate_size for backbone in space.backbones]
    assert all(128 <= width <= 144 for width in widths)
    assert all(design.intermediate_size <= 144 for design in architectures(space))


def test_hybrid_gpu_has_every_backbone() -> None:
    assert set(load_space("hybrid-gpu").backbones) == set(linear_mixers())
    assert load_space("hybrid-gpu").proxy.layers == 12


def test_p1_grid_is_the_papers_grid() -> None:
    space = load_space("p1-grid")
    assert len(space.backbones) == 6
    assert len(architectures(space)) == 30
    assert space.proxy.layers == 24
    found = list(grid(space))
    assert len(found) == count(space) == 90
    assert len({design.digest for _, design in found}) == 90
    full = baselines(space)
    assert all(not base.architecture.backbones for base in full)
    assert len(full) == 3  # as many recipes as every cell has
    ratios = {design.architecture.full_attention_layers for _, design in found}
    assert ratios == {(), (23,), (11, 23), (5, 11, 17, 23), (2, 5, 8, 11, 14, 17, 20, 23)}


def test_p2_grid_is_the_papers_mixers_pure_and_hybrid_under_both_optimisers() -> None:
    space = load_space("p2-grid")
    found = [design for _, design in grid(space)]
    cells = {(x.architecture.backbones, x.architecture.full_attention_layers, x.recipe.optimizer) for x in found}
    mixers = [("deltanet",), ("gated_deltanet",), ("kda",), ("gated_deltanet2",)]
    placements = [(), (2, 5, 8, 11, 14, 17)]
    assert cells == {(m, p, o) for m in mixers for p in placements for o in ("adamw", "muon")}
    assert len(found) == len(cells) * 3
    full = baselines(space)
    assert {(base.architecture.diagram, base.architecture.kv_heads) for base in full} == {("F" * 20, 1)}
    assert len(full) == 6


def test_p2_grid_has_the_papers_dimensions_at_its_deployment() -> None:
    """arXiv:2607.07953: 32,768 elements of state in a linear layer, 512 of keys and values a token in a softmax one."""
    space = load_space("p2-grid")
    for design in [*architectures(space), baselines(space)[0].architecture]:
        deployed = space.deployment.architecture(design)
        assert (len(deployed.layers), deployed.hidden_size, deployed.intermediate_size) == (20, 1024, 2816)
        assert deployed.full_attention_layers == design.full_attention_layers
        for one, x in zip(deployed.layers, deployed.dims(), strict=True):
            if one.is_softmax:
                assert (x.heads, x.head, x.kv_heads, one.rope_theta) == (16, 64, 4, 500000)
                assert one.entry.attention_state(x) == 512
            else:
                value_heads, value_head = (4, 128) if one.mixer == "deltanet" else (8, 64)
                assert (x.heads, x.head, x.value_heads, x.value_head, x.conv) == (4, 64, value_heads, value_head, 4)
                assert one.entry.recurrent_state(x) == 32768


def test_p2_grid_takes_clvr_as_the_paper_counts_it() -> None:
    space = load_space("p2-grid")
    plain, clvr = (architecture(space, "gated_deltanet", (2, 5, 8, 11, 14, 17), 4, x) for x in ("none", "clvr"))
    added = [parameters(space.deployment.architecture(design)) for design in (plain, clvr)]
    assert added[1] - added[0] == 14 * 512 * 1024  # +7.34M


def test_p2_grids_proxy_is_an_eighth_of_it() -> None:
    space = load_space("p2-grid")
    for design in architectures(space):
        deployed = space.deployment.architecture(design)
        for small, large in zip(design.dims(), deployed.dims(), strict=True):
            assert 8 * small.key == large.key
            assert 8 * small.value == large.value
            assert 8 * small.kv_heads * small.head == large.kv_heads * large.head
    full = baselines(space)[0].architecture
    assert 8 * full.intermediate_size == space.deployment.intermediate_size
    assert parameters(full) == pytest.approx(parameters(architectures(space)[0]), rel=0.01)
