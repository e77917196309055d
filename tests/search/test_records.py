"""Names of designs: short, and different where designs differ in what a search varies."""

from __future__ import annotations

import pytest

from nas.architecture import Architecture, LayerSpec, Routing
from nas.search.records import design_name

LAYERS = {
    "D": LayerSpec(mixer="gated_deltanet", heads=2, head_dim=16, conv_size=4),
    "g": LayerSpec(mixer="gla", heads=2, head_dim=16),
    "F": LayerSpec(mixer="softmax", heads=4, head_dim=8),
    "G": LayerSpec(mixer="softmax", heads=4, head_dim=8, kv_heads=1),
    "w": LayerSpec(mixer="softmax", heads=4, head_dim=8, window=64),
    "v": LayerSpec(mixer="softmax", heads=4, head_dim=8, window=64, kv_heads=2),
}


@pytest.mark.parametrize(
    ("stack", "routing", "name"),
    [
        ("FFFF", "none", "Full attention"),
        ("GGGG", "none", "Full attention GQA4"),
        ("DDDD", "none", "Gated DeltaNet pure"),
        ("DDDF", "none", "Gated DeltaNet 4:1"),
        ("DDDG", "none", "Gated DeltaNet 4:1 GQA4"),
        ("FDDD", "clvr", "Gated DeltaNet 1/4 early +CLVR"),
        ("DFDDD", "none", "Gated DeltaNet at 1"),
        ("DgDgD", "none", "Gated DeltaNet + GLA pure"),
        ("gDgF", "none", "GLA + Gated DeltaNet 4:1"),
        ("DDgDDgF", "none", "2 Gated DeltaNet + GLA 7:1"),
        ("DDgg", "none", "2 Gated DeltaNet + 2 GLA pure"),
        ("DwDw", "none", "Gated DeltaNet + SWA64 pure"),
        ("DvDv", "none", "Gated DeltaNet + SWA64 pure GQA2"),
        ("DvDG", "none", "Gated DeltaNet + SWA64 4:1 GQA4"),
        ("wwww", "none", "SWA64 pure"),
        ("DDDD", "clvr:16", "Gated DeltaNet pure +CLVR:16"),
        ("DDDg", "clvr+linear", "3 Gated DeltaNet + GLA pure +CLVR+linear"),
        ("DDDD", "cler:head", "Gated DeltaNet pure +CLER:head"),
        ("DDDD", "cler_h", "Gated DeltaNet pure +CLER-H"),
        ("DDDD", "self_transform", "Gated DeltaNet pure +self-transform"),
        ("DDDD", "wide_ffn", "Gated DeltaNet pure +wide FFN"),
    ],
)
def test_names(stack: str, routing: str, name: str) -> None:
    design = Architecture(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        layers=tuple(LAYERS[layer] for layer in stack),
        routing=Routing.parse(routing),
    )
    assert design_name(design) == name
