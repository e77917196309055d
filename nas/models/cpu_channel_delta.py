"""The delta rule with one decay a key channel on a CPU: Kimi Delta Attention and Gated DeltaNet-2 share one kernel.

With decays a_t in [0, 1]^K, key k, erase vector e and write value z, the state S [K, V] takes the steps
    S~ = Diag(a_t) S_{t-1},    S_t = S~ + k_t (z_t - S~' e_t)',    o_t = S_t' q_t;
e = b k and z = b v in Kimi Delta Attention (arXiv:2510.26692, section 3), e = b * k and z = w * v in Gated DeltaNet-2
(github.com/NVlabs/GatedDeltaNet-2). Within a chunk that starts from S, with A_t = a_1 * .. * a_t,
    u_i + sum_{j<i} (sum_c e_ic k_jc A_ic / A_jc) u_j = z_i - S' (A_i * e_i),
a unit lower triangular system, and o_i = S' (A_i * q_i) + sum_{j<=i} (sum_c q_ic k_jc A_ic / A_jc) u_j.
The quotients are products of decays, which `cpu_decay` takes without dividing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu_decay import corner, decayed_gradients, decayed_scores, log_decay_gradient
from .cpu_layout import by_sequence, from_chunks, to_chunks, widen
from .cpu_modules import l2norm

_CHUNK = 16  # fastest for heads of 8 to 32; from 64 on 32 would be faster


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """fla's `chunk_kda` and `fused_recurrent_kda`: beta [B, T, HV] erases and writes, all else as `gated_deltanet2`."""
    rate = widen(beta)[..., None]
    if use_beta_sigmoid_in_kernel:
        rate = rate.sigmoid() * (2 if allow_neg_eigval else 1)
    return gated_deltanet2(q, k, v, g, rate, rate, **options)


def gated_deltanet2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    safe_gate: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """fla's `chunk_gdn2` and `fused_recurrent_gdn2`.

    Args:
        q, k: [B, T, H, K]; each head serves HV / H value heads.
        v: [B, T, HV, V].
        g: log decays [B, T, HV, K], or with `use_gate_in_kernel` what `log_decay` makes them of.
        b: erase gate [B, T, HV, K].
        w: write gate [B, T, HV, V].
        safe_gate: only picks a faster kernel on a GPU.

    Returns:
        o [B, T, HV, V] in v's dtype and the state [N, HV, K, V] ([N, HV, V, K] with `state_v_first`) or None.
    """
    if use_gate_in_kernel:
        g = log_decay(g, A_log, dt_bias, lower_bound)
    q, k = (l2norm(x) if use_qk_l2norm_in_kernel else widen(x) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    groups = v.shape[2] // q.shape[2]
    if groups > 1:
        q, k = (x.repeat_interleave(groups, 2) for x in (q, k))
    if state_v_first and initial_state is not None:
        initial_state = initial_state.transpose(-1, -2)
    streams = (q, k, widen(b) * k, widen(w) * widen(v), g)
    o, state = by_sequence(_chunked, tuple(x.to(q.dtype) for x in streams), initial_state, cu_seqlens)
    if not output_final_state:
        return o.to(v.dtype), None
    return o.to(v.dtype), state.transpose(-1, -2).contiguous() if state_v_first else state


def log_decay(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """Log decays from the gate g [B, T, HV, K], A_log [HV] and dt_bias [HV * K] (arXiv:2510.26692, section 4).

    -exp(A_log) softplus(g + dt_bias), or with `lower_bound` that bound times sigmoid(exp(A_log) (g + dt_bias)).
    """
    g = widen(g)
    if dt_bias is not None:
        g = g + widen(dt_bias).view(g.shape[-2:])
    strength = 1 if A_log is None else widen(A_log).exp()[:, None]
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(strength * g)
    return -strength * F.softplus(g)


def _chunked(q: Tensor, k: Tensor, erase: Tensor, z: Tensor, g: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    length = q.shape[1]
    chunk = min(_CHUNK, 1 << max(0, length - 1).bit_length())
    if state is None:
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], z.shape[3])
    o, final = _ChannelDelta.apply(*(to_chunks(x, chunk) for x in (q, k, erase, z, g)), state.to(q.dtype))
    return from_chunks(o, length), final


class _ChannelDelta(torch.autograd.Function):
    """(q, k, e [B, H, N, C, K], z [B, H, N, C, V], g [B, H, N, C, K], S [B, H, K, V]) -> (o [B, H, N, C, V], S)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, erase: Tensor, z: Tensor, g: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        a, x = g.exp(), torch.stack([q, erase], -2)
        scores, read, write, carry, levels = decayed_scores(x, k, a)
        on_query, on_erase = scores.unbind(-2)
        on_query.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
        inverse = _unit_inverse(on_erase)
        fresh, erased = inverse @ z, inverse @ read[..., 1, :]
        u, states = torch.empty_like(fresh), state.new_empty(*q.shape[:3], *state.shape[2:])
        for n in range(q.shape[2]):
            states[:, :, n] = state
            u[:, :, n] = now = fresh[:, :, n] - erased[:, :, n] @ state
            state = state * carry[:, :, n] + write[:, :, n].mT @ now
        o = read[..., 0, :] @ states + on_query @ u
        ctx.save_for_backward(x, k, a, on_query, read, write, carry, inverse, erased, u, states, state, *levels)
        return o, state

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        do, dstate = grads[0].contiguous(), grads[1]
        x, k, a, on_query, read, write, carry, inverse, erased, u, states, final, *levels = ctx.saved_tensors
        last = (dstate * final).sum(-1)
        du, direct, dstates = on_query.mT @ do, read[..., 0, :].mT @ do, torch.empty_like(states)
        for n in reversed(range(states.shape[2])):
            dstates[:, :, n] = dstate
            du[:, :, n] += write[:, :, n] @ dstate
            dstate = dstate * carry[:, :, n] + direct[:, :, n] - erased[:, :, n].mT @ du[:, :, n]
        dz = inverse.mT @ du
        # o = (scores of q) u + (read of q) S, and z = (1 + scores of e) u + (read of e) S
        by_row = torch.stack([do, -dz], -2).flatten(-3, -2)
        dscores, dread = ((by_row @ y.mT).unflatten(-2, x.shape[-3:-1]) for y in (u, states))
        dx, dk = decayed_gradients(levels, a, dscores, dread, u @ dstates.mT)
        dg = log_decay_gradient(x, dx, k, dk, last)
        diagonal = dscores[..., 0, :].diagonal(dim1=-2, dim2=-1)[..., None]  # no decay between a token and itself
        return dx[..., 0, :] + diagonal * k, dk + diagonal * x[..., 0, :], dx[..., 1, :], dz, dg, dstate


def _unit_inverse(a: Tensor) -> Tensor:
    """(1 + a)^-1 of strictly lower triangular a [..., C, C], C a power of two: from blocks of s to blocks of 2 s."""
    blocks, size = a.new_ones(*a.shape[:-1], 1, 1), 1
    while size < a.shape[-1]:
        first, second = blocks.unflatten(-3, (-1, 2)).unbind(-3)
        blocks = a.new_zeros(*first.shape[:-2], 2 * size, 2 * size)
        blocks[..., :size, :size], blocks[..., size:, size:] = first, second
        blocks[..., size:, :size] = -(second @ corner(a, size, size) @ first)
        size *= 2
    return blocks.squeeze(-3)
