"""Random inputs for every mixer's kernels, as fla's layers call them: what test_gpu_kernels.py compares.

A kernel is found where its layer looks it up, so that the dispatcher of `nas.models.cpu_kernels` answers by device:
fla's Triton kernel on a GPU, ours on a CPU. Sizes are those of tests/models/fla_parity.py: compiled kernels are shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

B, H, HV, K, V = 2, 2, 4, 32, 32  # sequences, key heads, value heads, key and value size of a head
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Draw:
    """Streams [B, length, *shape] in float64; log decays lie between -decay and 0, every fifth near 0."""

    length: int
    decay: float

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(B, self.length, *shape, dtype=torch.float64)

    def rate(self, *shape: int) -> Tensor:
        return torch.rand(B, self.length, *shape, dtype=torch.float64)

    def log_decay(self, *shape: int) -> Tensor:
        g = -self.decay * self.rate(*shape)
        g[:, ::5] *= 0.001
        return g

    def raw_gate(self, *shape: int) -> Tensor:
        """What a kernel turns into log decays -exp(A_log) softplus(g + dt_bias) itself; see `gate`."""
        g = self.normal(*shape)
        g[:, ::5] -= 8
        return g

    def gate(self, heads: int, channels: int) -> Tensors:
        """A_log [heads] of about log(decay) and dt_bias [heads * channels]."""
        log_rate = math.log(self.decay) + 0.1 * torch.randn(heads, dtype=torch.float64)
        return {"A_log": log_rate, "dt_bias": 0.3 * torch.randn(heads * channels, dtype=torch.float64)}


@dataclass(frozen=True)
class Kernel:
    """One kernel of one mixer.

    Args:
        module, name: where its layer looks it up.
        inputs: its tensors by keyword, in float64, without the state.
        state: shape of the state of one sequence.
        fixed: its other arguments.
        wide: inputs that the layer hands over in float32 whatever the model's type.
        backward: whether it has a backward pass.
        state_gradients: "both" where gradients flow to the initial and from the final state, "initial", or "none".
        narrow_only: whether it refuses float32.
    """

    module: str
    name: str
    inputs: Callable[[Draw], Tensors]
    state: tuple[int, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    wide: frozenset[str] = frozenset({"initial_state"})
    backward: bool = True
    state_gradients: str = "both"
    narrow_only: bool = False

    def __call__(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        output, state = getattr(import_module(self.module), self.name)(**tensors, **self.fixed, output_final_state=True)
        return output, state


def _gated_delta_rule(draw: Draw) -> Tensors:
    return {
        "q": draw.normal(H, K), "k": draw.normal(H, K), "v": draw.normal(HV, V),
        "g": draw.raw_gate(HV), "beta": draw.normal(HV), **draw.gate(HV, 1),
    }  # fmt: skip


def _kda(draw: Draw) -> Tensors:
    return _gated_delta_rule(draw) | {"g": draw.raw_gate(HV, K), **draw.gate(HV, K)}


def _gated_delta_rule_2(draw: Draw) -> Tensors:
    return {
        "q": draw.normal(HV, K), "k": draw.normal(HV, K), "v": draw.normal(HV, V),
        "g": draw.log_decay(HV, K), "b": draw.rate(HV, K), "w": draw.rate(HV, V),
    }  # fmt: skip


def _delta_rule(draw: Draw) -> Tensors:
    return {"q": draw.normal(HV, K), "k": draw.normal(HV, K), "v": draw.normal(HV, V), "beta": draw.rate(HV)}


def _gla(draw: Draw, decay: str) -> Tensors:
    return {"q": draw.normal(H, K), "k": draw.normal(H, K), "v": draw.normal(H, V), decay: draw.log_decay(H, K)}


def _hgrn(draw: Draw) -> Tensors:
    return {"x": draw.normal(H * K), "g": draw.log_decay(H * K)}


def _retention(draw: Draw) -> Tensors:
    return {"q": draw.normal(H, K), "k": draw.normal(H, K), "v": draw.normal(H, 2 * V)}


def _simple_gla(draw: Draw) -> Tensors:
    return {"q": draw.normal(HV, K), "k": draw.normal(HV, K), "v": draw.normal(HV, V), "g": draw.log_decay(HV)}


def _rwkv6(draw: Draw) -> Tensors:
    return {
        "r": draw.normal(H, K), "k": draw.normal(H, K), "v": draw.normal(H, V), "w": draw.log_decay(H, K),
        "u": torch.randn(H, K, dtype=torch.float64),
    }  # fmt: skip


_IN_KERNEL = dict.fromkeys(
    ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "use_gate_in_kernel", "state_v_first"), True
)
_NORMED = {"use_qk_l2norm_in_kernel": True}
_V_FIRST = {"state_v_first": True}
_GATE = frozenset({"initial_state", "A_log", "dt_bias"})
_WIDE_G = frozenset({"initial_state", "g"})
_WIDE_W = frozenset({"initial_state", "w", "u"})
_GDN, _KDA, _GDN2 = "fla.layers.gated_deltanet", "fla.layers.kda", "fla.layers.gdn2"
_DELTA, _GLA, _HGRN = "fla.layers.delta_net", "fla.layers.gla", "fla.layers.hgrn"
_RETNET, _MAMBA, _RWKV = "fla.layers.multiscale_retention", "nas.models.mixer_mamba2", "fla.layers.rwkv6"

KERNELS: dict[tuple[str, str], Kernel] = {
    ("gated_deltanet", "chunk"): Kernel(
        _GDN, "chunk_gated_delta_rule", _gated_delta_rule, (HV, V, K), _IN_KERNEL, _GATE
    ),
    ("gated_deltanet", "recurrent"): Kernel(
        _GDN, "fused_recurrent_gated_delta_rule", _gated_delta_rule, (HV, V, K), _IN_KERNEL, _GATE, backward=False
    ),
    ("kda", "chunk"): Kernel(_KDA, "chunk_kda", _kda, (HV, V, K), _IN_KERNEL, _GATE),
    ("kda", "recurrent"): Kernel(_KDA, "fused_recurrent_kda", _kda, (HV, V, K), _IN_KERNEL, _GATE, backward=False),
    ("gated_deltanet2", "chunk"): Kernel(_GDN2, "chunk_gdn2", _gated_delta_rule_2, (HV, K, V), _NORMED, _WIDE_G),
    ("gated_deltanet2", "recurrent"): Kernel(
        _GDN2, "fused_recurrent_gdn2", _gated_delta_rule_2, (HV, K, V), _NORMED, _WIDE_G, backward=False
    ),
    ("deltanet", "chunk"): Kernel(_DELTA, "chunk_delta_rule", _delta_rule, (HV, K, V), _NORMED, narrow_only=True),
    ("deltanet", "recurrent"): Kernel(_DELTA, "fused_recurrent_delta_rule", _delta_rule, (HV, K, V), _NORMED),
    # HGRN-2 calls the kernels of GLA with keys 1 - decay
    ("gla", "chunk"): Kernel(_GLA, "chunk_gla", lambda draw: _gla(draw, "g"), (H, V, K), _V_FIRST),
    ("gla", "recurrent"): Kernel(_GLA, "fused_recurrent_gla", lambda draw: _gla(draw, "gk"), (H, V, K), _V_FIRST),
    ("hgrn", "chunk"): Kernel(_HGRN, "chunk_hgrn", _hgrn, (H * K,), wide=frozenset(), state_gradients="none"),
    ("hgrn", "recurrent"): Kernel(_HGRN, "fused_recurrent_hgrn", _hgrn, (H * K,), wide=frozenset()),
    ("retnet", "chunk"): Kernel(_RETNET, "chunk_retention", _retention, (H, K, 2 * V)),
    ("retnet", "recurrent"): Kernel(_RETNET, "fused_recurrent_retention", _retention, (H, K, 2 * V)),
    ("mamba2", "chunk"): Kernel(_MAMBA, "chunk_simple_gla", _simple_gla, (HV, K, V), {"scale": 1.0}, _WIDE_G),
    ("mamba2", "recurrent"): Kernel(
        _MAMBA, "fused_recurrent_simple_gla", _simple_gla, (HV, K, V), {"scale": 1.0}, _WIDE_G
    ),
    ("rwkv6", "chunk"): Kernel(_RWKV, "chunk_rwkv6", _rwkv6, (H, K, V), {"scale": 1.0}, _WIDE_W),
    ("rwkv6", "recurrent"): Kernel(
        _RWKV,
        "fused_recurrent_rwkv6",
        _rwkv6,
        (H, K, V),
        {"scale": 1.0},
        _WIDE_W,
        state_gradients="initial",
    ),
}


def run(
    kernel: Kernel, tensors: Tensors, weights: tuple[Tensor, Tensor] | None, dtype: torch.dtype
) -> tuple[Tensors, tuple[Tensor, Tensor]]:
    """Output, final state and, where there is a backward pass, the gradients of their sum weighted by `weights`.

    Returns:
        Results by name ("o", "state", "d" + input), and the weights: in float64, of values that `dtype` can hold,
        drawn here where none were given.
    """
    leaves = {name: x.detach().requires_grad_(kernel.backward) for name, x in tensors.items()}
    outputs = kernel(leaves)
    results = {"o": outputs[0].detach(), "state": outputs[1].detach()}
    if weights is None:
        first, second = (torch.randn(x.shape, dtype=torch.float64).to(dtype).double() for x in outputs)
        weights = first, second
    if not kernel.backward:
        return results, weights
    carried = 2 if kernel.state_gradients == "both" else 1
    wanted = [name for name in leaves if name != "initial_state" or kernel.state_gradients != "none"]
    gradients = torch.autograd.grad(
        outputs[:carried],
        [leaves[name] for name in wanted],
        [w.to(x.device, x.dtype) for w, x in zip(weights[:carried], outputs[:carried], strict=True)],
    )
    return results | {f"d{name}": x for name, x in zip(wanted, gradients, strict=True)}, weights
