"""Gated linear attention (GLA, HGRN-2) on a CPU: chunks under one decay a key channel (arXiv:2312.06635, section 4).

Within a chunk the score of query i on key j <= i is sum_k q_ik k_jk exp(g_{j+1} + .. + g_i)_k, taken by `cpu_decay`;
chunks hand on the state S [K, V].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .cpu_decay import decayed_gradients, decayed_scores, log_decay_gradient
from .cpu_layout import by_sequence, from_chunks, to_chunks, widen

_CHUNK = 16  # fastest for heads of 8 to 32; from 64 on 32 would be up to 17 % faster


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """fla's `chunk_gla` (log decays `g`) and `fused_recurrent_gla` (`gk`): q, k, g [B, T, H, K], v [B, T, H, V].

    Returns:
        o [B, T, H, V] in v's dtype and the state [N, H, K, V] ([N, H, V, K] with `state_v_first`) or None.
    """
    decay = g if g is not None else gk
    assert decay is not None
    scaled = widen(q) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if state_v_first and initial_state is not None:
        initial_state = initial_state.transpose(-1, -2)
    o, state = by_sequence(_chunked, (scaled, widen(k), widen(v), widen(decay)), initial_state, cu_seqlens)
    if not output_final_state:
        return o.to(v.dtype), None
    return o.to(v.dtype), state.transpose(-1, -2).contiguous() if state_v_first else state


def _chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    length = q.shape[1]
    chunk = min(_CHUNK, 1 << max(0, length - 1).bit_length())
    if state is None:
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    o, final = _ChunkedGLA.apply(*(to_chunks(x, chunk) for x in (q, k, v, g)), state.to(q.dtype))
    return from_chunks(o, length), final


class _ChunkedGLA(torch.autograd.Function):
    """(q, k [B, H, N, C, K], v [B, H, N, C, V], g [B, H, N, C, K], S [B, H, K, V]) -> (o [B, H, N, C, V], S)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        a, x = g.exp(), q[..., None, :]
        pairs, reads, write, carry, levels = decayed_scores(x, k, a)
        scores, read = pairs.squeeze(-2), reads.squeeze(-2)
        scores.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
        states = state.new_empty(*q.shape[:3], *state.shape[2:])
        added = write.mT @ v
        for n in range(q.shape[2]):
            states[:, :, n] = state
            state = state * carry[:, :, n] + added[:, :, n]
        ctx.save_for_backward(q, k, v, a, scores, read, write, carry, states, state, *levels)
        return scores @ v + read @ states, state

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        do, dstate = grads[0].contiguous(), grads[1]
        q, k, v, a, scores, read, write, carry, states, final, *levels = ctx.saved_tensors
        last = (dstate * final).sum(-1)
        added, dstates = read.mT @ do, torch.empty_like(states)
        for n in reversed(range(q.shape[2])):
            dstates[:, :, n] = dstate
            dstate = dstate * carry[:, :, n] + added[:, :, n]
        dscores, dread = do @ v.mT, do @ states.mT
        dx, dk = decayed_gradients(levels, a, dscores[..., None, :], dread[..., None, :], v @ dstates.mT)
        dg = log_decay_gradient(q[..., None, :], dx, k, dk, last)
        diagonal = dscores.diagonal(dim1=-2, dim2=-1)[..., None]  # no decay between a token and itself
        dv = scores.mT @ do + write @ dstates
        return dx.squeeze(-2) + diagonal * k, dk + diagonal * q, dv, dg, dstate
