"""The CPU kernels under test: random inputs for each and fla's naive recurrence to compare with.

To add a kernel, add an entry to KERNELS. `kernel` and `reference` are both called with the same keywords: the streams,
the parameters, `initial_state` (or None) and `output_final_state=True`; both return (output, final state).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from fla.ops.delta_rule.naive import delta_rule_recurrence
from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
from fla.ops.gdn2.naive import naive_recurrent_gdn2
from fla.ops.gla.naive import naive_recurrent_gla
from fla.ops.hgrn.naive import naive_recurrent_hgrn
from fla.ops.kda.naive import naive_recurrent_kda
from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6
from fla.ops.simple_gla.naive import naive_recurrent_simple_gla
from torch import Tensor

from nas.models import cpu_channel_delta, cpu_delta, cpu_gla, cpu_hgrn, cpu_rwkv6, cpu_simple_gla

H, K, V = 2, 6, 5
Tensors = dict[str, Tensor]
Kernel = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Draw:
    """Random streams [batch, length, *shape] of one test case."""

    batch: int
    length: int
    decay: float  # log decays lie between -decay and 0
    dtype: torch.dtype = torch.float32

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(self.batch, self.length, *shape, dtype=self.dtype)

    def unit(self, *shape: int) -> Tensor:
        """Vectors of length 1 over the last axis."""
        return F.normalize(self.normal(*shape), dim=-1)

    def rate(self, *shape: int) -> Tensor:
        """Uniform in [0, 1)."""
        return torch.rand(self.batch, self.length, *shape, dtype=self.dtype)

    def log_decay(self, *shape: int) -> Tensor:
        """Uniform in [-decay, 0], every fifth step near 0."""
        g = -self.decay * self.rate(*shape)
        g[:, ::5] *= 0.001
        return g


@dataclass(frozen=True)
class Case:
    kernel: Kernel
    reference: Kernel
    streams: Callable[[Draw], Tensors]
    """Inputs that vary over time, [batch, length, ...] each."""
    state: tuple[int, ...] = (H, K, V)
    """Shape of one sequence's state."""
    parameters: Callable[[torch.dtype], Tensors] = lambda dtype: {}
    """Inputs that all sequences share."""
    decays: bool = True
    """False where the kernel has no decay to choose."""
    handwritten: bool = False
    """True where the kernel has a backward pass of its own."""


def _qkv(draw: Draw) -> Tensors:
    return {"q": draw.normal(H, K), "k": draw.unit(H, K), "v": draw.normal(H, V)}


def _delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, initial_state: Tensor | None, **_: Any) -> Any:
    o, state = delta_rule_recurrence(*(x.transpose(1, 2) for x in (q, k, v, beta)), initial_state)
    return o.transpose(1, 2), state


def _gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **state: Any) -> Any:
    return naive_recurrent_gla(q, k, v, g, **state)


def _retention(q: Tensor, k: Tensor, v: Tensor, **state: Any) -> Any:
    g = torch.log(1 - 2.0 ** -(5.0 + torch.arange(H)))[:, None].expand_as(q)
    return naive_recurrent_gla(q, k, v, g, **state)


def _rwkv6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, **state: Any) -> Any:
    o, final = naive_recurrent_rwkv6(*(x.transpose(1, 2) for x in (r, k, v, w)), u, **state)
    return o.transpose(1, 2), final


KERNELS: dict[str, Case] = {
    "gated_delta_rule": Case(
        kernel=cpu_delta.gated_delta_rule,
        reference=naive_recurrent_gated_delta_rule,
        streams=lambda draw: {**_qkv(draw), "g": draw.log_decay(H), "beta": draw.rate(H)},
    ),
    "delta_rule": Case(
        kernel=cpu_delta.delta_rule,
        reference=_delta,
        streams=lambda draw: {**_qkv(draw), "beta": draw.rate(H)},
        decays=False,
    ),
    "kda": Case(
        kernel=cpu_channel_delta.kda,
        reference=naive_recurrent_kda,
        streams=lambda draw: {
            "q": draw.normal(H // 2, K),
            "k": draw.unit(H // 2, K),
            "v": draw.normal(H, V),
            "g": draw.log_decay(H, K),
            "beta": draw.rate(H),
        },
        handwritten=True,
    ),
    "gated_deltanet2": Case(
        kernel=cpu_channel_delta.gated_deltanet2,
        reference=naive_recurrent_gdn2,
        streams=lambda draw: {
            **_qkv(draw),
            "g": draw.log_decay(H, K),
            "b": draw.rate(H, K),
            "w": draw.rate(H, V),
        },
        handwritten=True,
    ),
    "gla": Case(
        kernel=cpu_gla.gla,
        reference=_gla,
        streams=lambda draw: {**_qkv(draw), "g": draw.log_decay(H, K)},
        handwritten=True,
    ),
    "hgrn": Case(
        kernel=cpu_hgrn.hgrn,
        reference=naive_recurrent_hgrn,
        streams=lambda draw: {"x": draw.normal(K), "g": draw.log_decay(K)},
        state=(K,),
        handwritten=True,
    ),
    "simple_gla": Case(
        kernel=cpu_simple_gla.simple_gla,
        reference=naive_recurrent_simple_gla,
        streams=lambda draw: {**_qkv(draw), "g": draw.log_decay(H)},
    ),
    "rwkv6": Case(
        kernel=cpu_rwkv6.rwkv6,
        reference=_rwkv6,
        streams=lambda draw: {
            "r": draw.normal(H, K),
            "k": draw.unit(H, K),
            "v": draw.normal(H, V),
            "w": draw.log_decay(H, K),
        },
        parameters=lambda dtype: {"u": torch.randn(H, K, dtype=dtype)},
    ),
    "retention": Case(kernel=cpu_simple_gla.retention, reference=_retention, streams=_qkv, decays=False),
}
