"""Token mixers by name: each builder makes one layer, mostly an fla layer, from its LayerSpec as a plain dict.

The names and size formulas are those of `nas.registry`; the two are joined by name only, so that this file travels
with an exported model. Another package adds a mixer through the entry-point group `nas.mixer_builders`: a function that
is called with `register`, when a model first needs the mixer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from torch import nn

from .mixer_mamba2 import Mamba2
from .softmax import SoftmaxAttention
from .upstream import (
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedLinearAttention,
    HGRN2Attention,
    HGRNAttention,
    KimiDeltaAttention,
    MultiScaleRetention,
    RWKV6Attention,
)

Layer = Mapping[str, Any]
Builder = Callable[[Layer, int, int, float], nn.Module]
"""(layer, hidden size, index in the stack, norm epsilon) -> a module with fla's layer signature:
forward(hidden_states, attention_mask, past_key_values, use_cache, ...) -> (output, None, past_key_values)."""

_BUILDERS: dict[str, Builder] = {}
_DELTA_RULE: set[str] = set()
_LOWER_BOUNDS: set[str] = set()
_LINEAR: set[str] = set()


def register(
    name: str, builder: Builder, *, delta_rule: bool = False, lower_bounds: bool = False, linear: bool = True
) -> None:
    """Add the mixer `name`.

    Args:
        builder: makes one layer.
        delta_rule: whether its state follows a delta rule, so that cross-layer routing touches it.
        lower_bounds: whether its forward takes `lower_bound`, a row [heads * head_dim] of a model-wide table.
        linear: whether it keeps a state of fixed size: routed too under `scope: linear`.

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
    if linear:
        _LINEAR.add(name)


def build_mixer(layer: Layer, hidden_size: int, layer_idx: int, norm_eps: float) -> nn.Module:
    """The mixer that `layer["mixer"]` names.

    Raises:
        ValueError: no builder of that name; the message lists all.
    """
    name = layer["mixer"]
    _load(name)
    with warnings.catch_warnings():
        # a search may try a stack without convolutions; fla warns at each such layer
        warnings.filterwarnings("ignore", message="ShortConvolution is crucial")
        return _BUILDERS[name](layer, hidden_size, layer_idx, norm_eps)


def _load(name: str) -> None:
    """Make sure that `name` has a builder: ours, or that of an installed package (entry point `nas.mixer_builders`)."""
    if name in _BUILDERS:
        return
    for entry in entry_points(group="nas.mixer_builders", name=name):
        entry.load()(register)
    if name not in _BUILDERS:
        raise ValueError(
            f"mixer {name!r} has no builder; allowed: {', '.join(_BUILDERS)}, and what installed packages give as "
            f"entry point nas.mixer_builders:{name}"
        )


def is_delta_rule(name: str) -> bool:
    _load(name)
    return name in _DELTA_RULE


def is_linear(name: str) -> bool:
    _load(name)
    return name in _LINEAR


def has_lower_bounds(name: str) -> bool:
    _load(name)
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
        qk_norm=bool(layer.get("qk_norm")),
        norm_eps=norm_eps,
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


def build_kda(layer: Layer, hidden_size: int, layer_idx: int, norm_eps: float) -> nn.Module:
    return KimiDeltaAttention(
        hidden_size=hidden_size,
        head_dim=layer["head_dim"],
        num_heads=layer["heads"],
        num_v_heads=layer.get("value_heads"),
        expand_v=layer["expand_v"],
        layer_idx=layer_idx,
        norm_eps=norm_eps,
        **_convolution(layer),
    )


def build_gated_deltanet2(layer: Layer, hidden_size: int, layer_idx: int, norm_eps: float) -> nn.Module:
    return GatedDeltaNet2(
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
        mode="fused_recurrent",  # as fla's HGRNConfig: the chunk kernel leaves a float32 state in a bf16 model's cache
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


def build_mamba2(layer: Layer, hidden_size: int, layer_idx: int, norm_eps: float) -> nn.Module:
    return Mamba2(
        hidden_size=hidden_size,
        num_heads=layer.get("value_heads", layer["heads"]),
        head_dim=round(layer["head_dim"] * layer["expand_v"]),
        n_groups=layer["heads"],
        state_size=layer["head_dim"],
        conv_kernel=layer["conv_size"],
        layer_idx=layer_idx,
        norm_eps=norm_eps,
    )


def build_rwkv6(layer: Layer, hidden_size: int, layer_idx: int, norm_eps: float) -> nn.Module:
    with warnings.catch_warnings():
        # fla's authors advise to cross-check against the official code; our tests compare with the written recurrence
        warnings.filterwarnings("ignore", message="According to Bo")
        mixer = RWKV6Attention(
            hidden_size=hidden_size,
            num_heads=layer["heads"],
            expand_k=_key_size(layer) / hidden_size,
            expand_v=value_size(layer) / hidden_size,
            layer_idx=layer_idx,
            norm_eps=norm_eps,
        )
    mixer.gate_fn = nn.functional.silu  # fla fixes its Triton one when the layer is made, for whatever device
    return mixer


register("softmax", build_softmax, linear=False)
register("gated_deltanet", build_gated_deltanet, delta_rule=True)
register("kda", build_kda, delta_rule=True)
register("gated_deltanet2", build_gated_deltanet2, delta_rule=True)
register("deltanet", build_deltanet, delta_rule=True)
register("gla", build_gla)
register("hgrn2", build_hgrn2, lower_bounds=True)
register("hgrn", build_hgrn, lower_bounds=True)
register("retnet", build_retnet)
register("mamba2", build_mamba2)
register("rwkv6", build_rwkv6)
