"""fla's layers on a CPU: plain PyTorch in place of Triton kernels, chosen by the tensors' device at each call.

`install` replaces the kernel names that fla's layers and modules look up by dispatchers. On CUDA they call fla's own
function, untouched; the original stays at `__wrapped__`. fla.ops itself is left alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from .cpu_delta import delta_rule, gated_delta_rule
from .cpu_gla import gla
from .cpu_hgrn import hgrn
from .cpu_modules import (
    causal_conv1d,
    causal_conv1d_update,
    rms_norm,
    rms_norm_gated,
    rms_norm_linear,
    rotary_embedding,
    swiglu,
    swiglu_linear,
    swish,
)
from .cpu_retention import retention

_MARK = "_cpu_dispatcher"

_KERNELS: dict[str, dict[str, Callable[..., Any]]] = {
    "fla.modules.norm.layernorm": {"rms_norm": rms_norm},
    "fla.modules.norm.fused_norm_gate": {"rms_norm_gated": rms_norm_gated},
    "fla.modules.mlp": {"swiglu_linear": swiglu_linear},
    "fla.modules.rotary.ops": {"rotary_embedding": rotary_embedding},
    "fla.modules.causal_conv1d.ops": {
        "causal_conv1d": causal_conv1d,
        "causal_conv1d_update": causal_conv1d_update,
    },
    "fla.layers.gated_deltanet": {
        "causal_conv1d": causal_conv1d,
        "chunk_gated_delta_rule": gated_delta_rule,
        "fused_recurrent_gated_delta_rule": gated_delta_rule,
    },
    "fla.layers.delta_net": {
        "chunk_delta_rule": delta_rule,
        "fused_recurrent_delta_rule": delta_rule,
    },
    "fla.layers.gla": {"chunk_gla": gla, "fused_recurrent_gla": gla},
    "fla.layers.hgrn2": {
        "chunk_gla": gla,
        "fused_recurrent_gla": gla,
        "rms_norm_linear": rms_norm_linear,
        "swish": swish,
    },
    "fla.layers.hgrn": {
        "chunk_hgrn": hgrn,
        "fused_recurrent_hgrn": hgrn,
        "swiglu": swiglu,
    },
    "fla.layers.multiscale_retention": {
        "chunk_retention": retention,
        "fused_recurrent_retention": retention,
    },
}


def install() -> None:
    """Put the dispatchers in place, once a process.

    Raises:
        AttributeError: fla has no longer one of the names; this code fits fla 0.6.
    """
    for path, kernels in _KERNELS.items():
        module = import_module(path)
        for name, on_cpu in kernels.items():
            original = getattr(module, name)
            if not hasattr(original, _MARK):
                setattr(module, name, _by_device(original, on_cpu))


def _by_device(original: Callable[..., Any], on_cpu: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        first = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        return (on_cpu if first.device.type == "cpu" else original)(*args, **kwargs)

    setattr(dispatch, _MARK, True)
    return dispatch
