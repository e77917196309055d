"""Gated linear attention (GLA, HGRN-2) on a CPU: one decay a key channel, safe at any strength.

Within a chunk the score of query i on key j <= i is sum_k q_ik k_jk exp(g_{j+1} + .. + g_i)_k. Pairs are split by
levels: at level s = 1, 2, 4, .. chunks fall into blocks of 2 s, and queries of a right half meet keys of the left half
through the middle, (q exp(sum from the middle to i)) . (k exp(sum from j to the middle)). Both exponents are sums of
log decays <= 0, never differences, so nothing overflows and nothing cancels; all pairs cost log2(C) small matrix
products and C log2(C) K exponentials, against C^2 K for the direct form (arXiv:2312.06635, section 4, has two levels).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .cpu_layout import by_sequence, from_chunks, to_chunks, widen

_CHUNK = 32


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


def _levels(g: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (s, head, tail) for s = 1, 2, .., C: the sums of g [..., C, K] within blocks of s.

    head_i is the sum from the block's start to i, i included; tail_j the sum after j to the block's end.
    The two tensors are updated in place between the yields.
    """
    head, tail = g.clone(), torch.zeros_like(g)
    size, chunk = 1, g.shape[-2]
    yield size, head, tail
    while size < chunk:
        total = _halves(head, size)[..., -1:, :].clone()  # [..., blocks, 2, 1, K]
        _halves(head, size)[..., 1, :, :] += total[..., 0, :, :]
        _halves(tail, size)[..., 0, :, :] += total[..., 1, :, :]
        size *= 2
        yield size, head, tail


def _halves(x: Tensor, size: int) -> Tensor:
    """[..., C, K] -> [..., blocks, 2, size, K]."""
    return x.unflatten(-2, (-1, 2, size))


def _corner(a: Tensor, size: int) -> Tensor:
    """View of the pairs (query in a right half, key in its left half) in a [..., C, C]: [..., size, size, blocks]."""
    blocks = a.unflatten(-1, (-1, 2, size)).unflatten(-4, (-1, 2, size))  # [..., blocks, 2, size, blocks, 2, size]
    return blocks[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2)


class _ChunkedGLA(torch.autograd.Function):
    """(q, k [B, H, N, C, K], v [B, H, N, C, V], g [B, H, N, C, K], S [B, H, K, V]) -> (o [B, H, N, C, V], S)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        chunk = q.shape[-2]
        scores = q.new_zeros(*q.shape[:-1], chunk)
        scores.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
        head = tail = g
        for size, head, tail in _levels(g):
            if size < chunk:
                right = (_halves(q, size)[..., 1, :, :]) * _halves(head, size)[..., 1, :, :].exp()
                left = (_halves(k, size)[..., 0, :, :]) * _halves(tail, size)[..., 0, :, :].exp()
                _corner(scores, size).copy_((right @ left.mT).movedim(-3, -1))
        read, write, carry = q * head.exp(), k * tail.exp(), head[..., -1, :, None].exp()
        o = scores @ v
        states = [state]
        for n in range(q.shape[2]):
            o[:, :, n] += read[:, :, n] @ state
            state = state * carry[:, :, n] + write[:, :, n].mT @ v[:, :, n]
            states.append(state)
        ctx.save_for_backward(q, k, v, g, scores, torch.stack(states, 2))
        return o, state

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        do, dstate = grads[0].contiguous(), grads[1]
        q, k, v, g, scores, states = ctx.saved_tensors
        chunk = q.shape[-2]
        dscores, dv = do @ v.mT, scores.mT @ do
        dq, dk = torch.zeros_like(q), torch.zeros_like(k)
        head = tail = g
        for size, head, tail in _levels(g):
            if size < chunk:
                after, before = (_halves(head, size)[..., 1, :, :].exp(), _halves(tail, size)[..., 0, :, :].exp())
                corner = _corner(dscores, size).movedim(-1, -3).contiguous()
                _halves(dq, size)[..., 1, :, :] += after * (corner @ (_halves(k, size)[..., 0, :, :] * before))
                _halves(dk, size)[..., 0, :, :] += before * (corner.mT @ (_halves(q, size)[..., 1, :, :] * after))
        since, until, carry = head.exp(), tail.exp(), head[..., -1, :, None].exp()
        last = (dstate * states[:, :, -1]).sum(-1)
        for n in reversed(range(q.shape[2])):
            dq[:, :, n] += since[:, :, n] * (do[:, :, n] @ states[:, :, n].mT)
            dk[:, :, n] += until[:, :, n] * (v[:, :, n] @ dstate.mT)
            dv[:, :, n] += (k[:, :, n] * until[:, :, n]) @ dstate
            dstate = dstate * carry[:, :, n] + (q[:, :, n] * since[:, :, n]).mT @ do[:, :, n]
        # every decay enters as exp(G_i - G_j), G the running sum: dG = q dq - k dk, and the last state's share at T
        running = (q * dq - k * dk).flatten(2, 3)
        dg = (running.flip(2).cumsum(2).flip(2) + last[:, :, None]).unflatten(2, q.shape[2:4])
        diagonal = dscores.diagonal(dim1=-2, dim2=-1)[..., None]  # no decay between a token and itself
        return dq + diagonal * k, dk + diagonal * q, dv, dg, dstate
