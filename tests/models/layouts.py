"""Head layouts of each mixer at hidden size 32, for the tests of memory and parameters."""

from typing import Any

from nas.architecture import Architecture, LayerSpec

LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "softmax": [
        {"heads": 2, "head_dim": 16, "rope_theta": 1e4},
        {"heads": 4, "head_dim": 8, "kv_heads": 2, "qk_norm": True},
        {"heads": 6, "head_dim": 4, "kv_heads": 1, "rope_theta": 5e5},
        {"heads": 2, "head_dim": 16, "window": 1},
        {"heads": 4, "head_dim": 8, "kv_heads": 2, "window": 4, "rope_theta": 1e4},
        {"heads": 4, "head_dim": 8, "kv_heads": 1, "window": 34, "qk_norm": True, "rope_theta": 1e4},
        {"heads": 2, "head_dim": 8, "window": 1000},
    ],
    "gated_deltanet": [
        {"heads": 2, "head_dim": 16},
        {"heads": 2, "head_dim": 16, "expand_v": 2.0, "conv_size": 4},
        {"heads": 1, "head_dim": 8, "value_heads": 3, "conv_size": 4},
        {"heads": 2, "head_dim": 8, "value_heads": 4, "expand_v": 0.5, "conv_size": 3},
    ],
    "deltanet": [
        {"heads": 2, "head_dim": 16},
        {"heads": 4, "head_dim": 8, "expand_v": 2.0, "conv_size": 4},
        {"heads": 1, "head_dim": 16, "expand_v": 0.5, "conv_size": 2},
    ],
    "gla": [
        {"heads": 2, "head_dim": 16},
        {"heads": 4, "head_dim": 8, "expand_v": 2.0, "conv_size": 4},
        {"heads": 1, "head_dim": 16, "expand_v": 0.5, "conv_size": 4},
    ],
    "hgrn2": [
        {"heads": 2, "head_dim": 16},
        {"heads": 4, "head_dim": 8, "conv_size": 4},
        {"heads": 1, "head_dim": 32, "conv_size": 3},
    ],
    "hgrn": [
        {"heads": 2, "head_dim": 16},
        {"heads": 4, "head_dim": 8, "conv_size": 4},
        {"heads": 1, "head_dim": 32, "conv_size": 3},
    ],
    "retnet": [
        {"heads": 2, "head_dim": 16, "expand_v": 2.0},
        {"heads": 4, "head_dim": 8, "conv_size": 4},
        {"heads": 1, "head_dim": 32, "expand_v": 0.5, "conv_size": 4},
    ],
    "mamba2": [
        {"heads": 1, "head_dim": 16, "value_heads": 4, "conv_size": 4},
        {"heads": 2, "head_dim": 8, "value_heads": 4, "expand_v": 2.0, "conv_size": 4},
        {"heads": 1, "head_dim": 32, "value_heads": 2, "expand_v": 0.5, "conv_size": 2},
    ],
    "rwkv6": [
        {"heads": 2, "head_dim": 16},
        {"heads": 4, "head_dim": 8, "expand_v": 2.0},
        {"heads": 1, "head_dim": 16, "expand_v": 0.5},
    ],
    "kda": [
        {"heads": 2, "head_dim": 16},
        {"heads": 2, "head_dim": 16, "expand_v": 2.0, "conv_size": 4},
        {"heads": 1, "head_dim": 8, "value_heads": 3, "expand_v": 0.5, "conv_size": 4},
    ],
    "gated_deltanet2": [
        {"heads": 2, "head_dim": 16},
        {"heads": 2, "head_dim": 16, "expand_v": 2.0, "conv_size": 4},
        {"heads": 1, "head_dim": 8, "value_heads": 3, "expand_v": 0.5, "conv_size": 4},
    ],
}


def stack(*names: str, **fields: Any) -> Architecture:
    """The named mixers: every layout of a single one, or one layout of each, in turn another."""
    if len(names) == 1:
        layouts = [(names[0], layout) for layout in LAYOUTS[names[0]]]
    else:
        layouts = [(name, LAYOUTS[name][i % len(LAYOUTS[name])]) for i, name in enumerate(names)]
    layers = tuple(LayerSpec(mixer=name, **layout) for name, layout in layouts)
    return Architecture(vocab_size=50, hidden_size=32, intermediate_size=8, layers=layers, **fields)
