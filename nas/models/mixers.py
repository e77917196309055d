"""Token mixers by name: each builder makes one layer, mostly an fla layer, from its LayerSpec as a plain dict.

The names and size formulas are those of `nas.registry`; the two are joined by name only, so that this file travels
with an exported model. Another package adds a mixer with `register`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from .softmax import SoftmaxAttention
from .upstream import (
    DeltaNet,
    GatedDeltaNet,
    GatedLinearAttention,
    HGRN2Attention,
    HGRNAttention,
    MultiScaleRetention,
)

Layer = Mapping[str, Any]
Builder = Callable[[Layer, int, int, float], nn.Module]
"""(layer, hidden size, index in the stack, norm epsilon) -> a module with fla's layer signature:
forward(hidden_states, attention_mask, past_key_values, use_cache, ...) -> (output, None, past_key_values)."""

_BUILDERS: dict[str, Builder] = {}
_DELTA_RULE: set[str] = set()
_LOWER_BOUNDS: set[str] = set()


def register(name: str, builder: Builder, *, delta_rule: bool = False, lower_bounds: bool = False) -> None:
    """Add the mixer `name`.

    Args:
        builder: makes one layer.
        delta_rule: whether its values are routed under cross-layer value routing.
        lower_bounds: whether its forward takes `lower_bound`, a row [heads * head_dim] of a model-wide table.

    Raises:
        ValueError: the name is taken.
    """
    if name in _BUILDERS:
        raise ValueError(f"mixer {name!r} is registered already")
    _BUILDERS[name] = builder
    if delta_rule:
        _DELTA_RULE.add(name)
    if lower_bounds:
        _LOWER_BOUNDS.add(name)


def build_mixer(layer: Layer, hidden_size: int, layer_idx: int, norm_eps: float) -> nn.Module:
    """The mixer that `layer["mixer"]` names.

    Raises:
        ValueError: no builder of that name; the message lists all.
    """
    name = layer["mixer"]
    if name not in _BUILDERS:
        raise ValueError(f"mixer {name!r} has no builder; allowed: {', '.join(_BUILDERS)}")
    with warnings.catch_warnings():
        # a search may try a stack without convolutions; fla warns at each such layer
        warnings.filterwarnings("ignore", message="ShortConvolution is crucial")
        return _BUILDERS[name](layer, hidden_size, layer_idx, norm_eps)


def is_delta_rule(name: str) -> bool:
    return name in _DELTA_RULE


def has_lower_bounds(name: str) -> bool:
    return name in _LOWER_BOUNDS


def value_size(layer: Layer) -> int:
    """Width of the layer's values over all heads: value heads * head_dim * expand_v."""
    heads: int = layer.get("value_heads", layer["heads"])
    return heads * round(layer["head_dim"] * layer["expand_v"])


def _key_size(layer: Layer) -> int:
    size: int = layer["heads"] * layer["head_dim"]
    return size


def _convolution(layer: Layer) -> dict[str, Any]:
    size = layer["conv_size"]
    return {"use_short_conv": size > 0, "conv_size": size}


def build_softmax(layer: Layer, hidden_size: int, layer_idx: int, norm_eps: float) -> nn.Module:
    return SoftmaxAttention(
        hidden_size=hidden_size,
        num_heads=layer["heads"],
        head_dim=layer["head_dim"],
        num_kv_heads=layer.get("kv_heads", layer["heads"]),
        layer_idx=layer_idx,
        window=layer.get("window"),
        rope_theta=layer.get("rope_theta"),
    )


def build_gated_deltanet(layer: Layer, hidden_size: int, layer_idx: int, norm_eps: float) -> nn.Module:
    return GatedDeltaNet(
        hidden_size=hidden_size,
        head_dim=layer["head_dim"],
        num_heads=layer["heads"],
        num_v_heads=layer.get("value_heads"),
        expand_v=layer["expand_v"],
        layer_idx=layer_idx,
        norm_eps=norm_eps,
        **_convolution(layer),
    )


def build_deltanet(layer: Layer, hidden_size: int, layer_idx: int, norm_eps: float) -> nn.Module:
    return DeltaNet(
        hidden_size=hidden_size,
        num_heads=layer["heads"],
        expand_k=_key_size(layer) / hidden_size,
        expand_v=value_size(layer) / hidden_size,
        layer_idx=layer_idx,
        norm_eps=norm_eps,
        **_convolution(layer),
    )


def build_gla(layer: Layer, hidden_size: int, layer_idx: int, norm_eps: float) -> nn.Module:
    return GatedLinearAttention(
        hidden_size=hidden_size,
        num_heads=layer["heads"],
        expand_k=_key_size(layer) / hidden_size,
        expand_v=value_size(layer) / hidden_size,
        layer_idx=layer_idx,
        norm_eps=norm_eps,
        **_convolution(layer),
    )


def build_hgrn2(layer: Layer, hidden_size: int, layer_idx: int, norm_eps: float) -> nn.Module:
    return HGRN2Attention(
        hidden_size=hidden_size,
        expand_ratio=layer["head_dim"],
        layer_idx=layer_idx,
        norm_eps=norm_eps,
        **_convolution(layer),
    )


def build_hgrn(layer: Layer, hidden_size: int, layer_idx: int, norm_eps: float) -> nn.Module:
    return HGRNAttention(
        hidden_size=hidden_size,
        expand_ratio=_key_size(layer) // hidden_size,
        layer_idx=layer_idx,
        norm_eps=norm_eps,
        **_convolution(layer),
    )


def build_retnet(layer: Layer, hidden_size: int, layer_idx: int, norm_eps: float) -> nn.Module:
    return MultiScaleRetention(
        hidden_size=hidden_size,
        num_heads=layer["heads"],
        expand_k=_key_size(layer) / hidden_size,
        expand_v=value_size(layer) / hidden_size,
        layer_idx=layer_idx,
        norm_eps=norm_eps,
        **_convolution(layer),
    )


register("softmax", build_softmax)
register("gated_deltanet", build_gated_deltanet, delta_rule=True)
register("deltanet", build_deltanet, delta_rule=True)
register("gla", build_gla)
register("hgrn2", build_hgrn2, lower_bounds=True)
register("hgrn", build_hgrn, lower_bounds=True)
register("retnet", build_retnet)
