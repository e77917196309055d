"""fla's layers on a CPU: plain PyTorch in place of Triton kernels, chosen by the tensors' device at each call.

`install` replaces the kernel names that fla's layers and modules look up by dispatchers. On CUDA they call fla's own
function, untouched; the original stays at `__wrapped__`. fla.ops itself is left alone. `tapped` lets a caller see, and
change, what a mixer hands to its kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .cpu_channel_delta import gated_deltanet2, kda
from .cpu_delta import delta_rule, gated_delta_rule
from .cpu_gla import gla
from .cpu_hgrn import hgrn
from .cpu_modules import (
    causal_conv1d,
    causal_conv1d_update,
    group_norm,
    rms_norm,
    rms_norm_after_gate,
    rms_norm_gated,
    rms_norm_linear,
    rotary_embedding,
    swiglu,
    swiglu_linear,
    swish,
    token_shift,
)
from .cpu_rwkv6 import rwkv6
from .cpu_simple_gla import retention, simple_gla
from .upstream import fla

Kernel = Callable[..., Any]
Tap = Callable[[Kernel, dict[str, Any]], Any]
"""(kernel for the tensors' device, the arguments of its call by name) -> what the call returns."""

_MARK = "_kernel_dispatcher"

# a model loaded from an export has its own copy of this file, but the dispatchers in place are those of the first copy
_TAP: ContextVar[Tap | None] = vars(fla).setdefault("_nas_kernel_tap", ContextVar("kernel_tap", default=None))

_KERNELS: dict[str, dict[str, Kernel]] = {
    "fla.modules.norm.layernorm": {"rms_norm": rms_norm, "group_norm": group_norm},
    "fla.modules.norm.layernorm_gated": {"rmsnorm_fn": rms_norm_after_gate},
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
    "fla.layers.kda": {"chunk_kda": kda, "fused_recurrent_kda": kda},
    "fla.layers.gdn2": {"chunk_gdn2": gated_deltanet2, "fused_recurrent_gdn2": gated_deltanet2},
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
    "fla.layers.rwkv6": {
        "chunk_rwkv6": rwkv6,
        "fused_recurrent_rwkv6": rwkv6,
        "token_shift": token_shift,
    },
    ".mixer_mamba2": {
        "causal_conv1d": causal_conv1d,
        "chunk_simple_gla": simple_gla,
        "fused_recurrent_simple_gla": simple_gla,
    },
}


def install() -> None:
    """Put the dispatchers in place, once a process.

    Raises:
        AttributeError: fla has no longer one of the names; this code fits fla 0.6.
    """
    for path, kernels in _KERNELS.items():
        module = import_module(path, __package__)
        for name, on_cpu in kernels.items():
            original = getattr(module, name)
            if not hasattr(original, _MARK):
                mixes = name.startswith(("chunk_", "fused_recurrent_"))
                setattr(module, name, _by_device(original, on_cpu, mixes))


@contextmanager
def tapped(tap: Tap) -> Iterator[None]:
    """Within the block, `tap` makes this thread's calls of sequence-mixing kernels (`chunk_*`, `fused_recurrent_*`).

    It may change the arguments, and call the kernel any number of times. Blocks may nest; the inner tap counts.
    """
    token = _TAP.set(tap)
    try:
        yield
    finally:
        _TAP.reset(token)


def _by_device(original: Kernel, on_cpu: Kernel, tappable: bool) -> Kernel:
    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        first = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        exact = tappable and torch.is_autocast_enabled("cpu")
        kernel = (_exact if exact else on_cpu) if first.device.type == "cpu" else original
        tap = _TAP.get() if tappable else None
        if tap is None:
            return kernel(*args, **kwargs)
        if args:
            raise TypeError(f"{original.__name__} got {len(args)} arguments by position; routing needs them by keyword")
        return tap(kernel, kwargs)

    def _exact(*args: Any, **kwargs: Any) -> Any:
        """Without autocast, which would round inside of a kernel that widens by itself, and has no triangular solve."""
        with torch.autocast("cpu", enabled=False):
            return on_cpu(*args, **kwargs)

    setattr(dispatch, _MARK, True)
    return dispatch
