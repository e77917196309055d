"""HGRN on a CPU: the element-wise recurrence h_t = exp(g_t) h_{t-1} + x_t, with its own backward pass.

The state is one vector, so walking over time costs one fused multiply-add a step on [B, D]; a parallel scan would read
all of [B, T, D] log T times. Nothing is exponentiated but single log decays g <= 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .cpu_layout import by_sequence, widen


def hgrn(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """fla's `chunk_hgrn`: inputs x and log decays g [B, T, D], state [N, D] -> o [B, T, D], last state or None.

    Both come back in x's dtype, as fla keeps them.
    """
    o, state = by_sequence(_scan, (widen(x), widen(g)), initial_state, cu_seqlens)
    return o.to(x.dtype), state.to(x.dtype) if output_final_state else None


def _scan(x: Tensor, g: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    start = x.new_zeros(x.shape[0], x.shape[2]) if state is None else state.to(x.dtype)
    if x.shape[1] == 0:
        return x, start
    o = _Recurrence.apply(x, g.exp(), start)
    return o, o[:, -1].clone()


class _Recurrence(torch.autograd.Function):
    """h_t = a_t h_{t-1} + x_t for x, a [B, T, D] and h_0 [B, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, start: Tensor) -> Tensor:
        a = a.transpose(0, 1).contiguous()  # time first: each step is contiguous
        h = x.transpose(0, 1).clone(memory_format=torch.contiguous_format)
        previous = start
        for h_t, a_t in zip(h.unbind(0), a.unbind(0), strict=True):
            previous = h_t.addcmul_(a_t, previous)
        ctx.save_for_backward(h, a, start)
        return h.transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, a, start = ctx.saved_tensors
        dx = grads[0].transpose(0, 1).clone(memory_format=torch.contiguous_format)
        for t in range(len(dx) - 2, -1, -1):
            dx[t].addcmul_(a[t + 1], dx[t + 1])
        da = dx * torch.cat([start[None], h[:-1]])
        return dx.transpose(0, 1), da.transpose(0, 1), dx[0] * a[0]
