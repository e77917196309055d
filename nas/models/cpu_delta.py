"""The delta rule, gated or not, on a CPU: chunks, each solved as one triangular system.

Within a chunk, with D_ij = exp(sum of log decays over j+1..i), the pseudo-values u obey
    u_i + b_i sum_{j<i} D_ij (k_i . k_j) u_j = b_i (v_i - exp(g_1 + .. + g_i) S' k_i),
a unit lower triangular system, and o_i = q_i S exp(..) + sum_{j<=i} D_ij (q_i . k_j) u_j
(Yang et al., arXiv:2412.06464, section 3.3). All exponents are <= 0.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu_layout import by_sequence, from_chunks, to_chunks, widen
from .cpu_modules import l2norm

_CHUNK = 32


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """fla's `chunk_gated_delta_rule`: q, k [B, T, H, K], v [B, T, HV, V], g and beta [B, T, HV].

    Returns:
        o [B, T, HV, V] in v's dtype and the state [N, HV, K, V] ([N, HV, V, K] with `state_v_first`) or None.
    """
    g, beta = widen(g), widen(beta)
    if use_gate_in_kernel:
        assert A_log is not None
        g = -widen(A_log).exp() * F.softplus(g if dt_bias is None else g + widen(dt_bias))
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    q, k = (l2norm(x) if use_qk_l2norm_in_kernel else widen(x) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    groups = v.shape[2] // q.shape[2]
    if groups > 1:
        q, k = (x.repeat_interleave(groups, 2) for x in (q, k))
    if state_v_first and initial_state is not None:
        initial_state = initial_state.transpose(-1, -2)
    o, state = by_sequence(_chunked, (q, k, widen(v), beta, g), initial_state, cu_seqlens)
    if not output_final_state:
        return o.to(v.dtype), None
    return o.to(v.dtype), state.transpose(-1, -2).contiguous() if state_v_first else state


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """fla's `chunk_delta_rule`: q, k [B, T, H, K], v [B, T, H, V], beta [B, T, H]; state [N, H, K, V]."""
    q, k = (l2norm(x) if use_qk_l2norm_in_kernel else widen(x) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    o, state = by_sequence(_ungated, (q, k, widen(v), widen(beta)), initial_state, cu_seqlens)
    return o.to(v.dtype), state if output_final_state else None


def _ungated(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    return _chunked(q, k, v, beta, None, state)


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """q (scaled), k [B, T, H, K], v [B, T, H, V], beta and log decay g [B, T, H] -> o [B, T, H, V], S [B, H, K, V]."""
    length, key, value = q.shape[1], q.shape[-1], v.shape[-1]
    chunk = max(1, min(_CHUNK, length))
    q, k, v, b = (to_chunks(x, chunk) for x in (q, k, v, beta[..., None]))
    k_beta, erase, read, write, carry = k * b, k * b, q, k, None
    a, qk = (k_beta @ k.mT).tril(-1), (q @ k.mT).tril()
    if g is not None:
        decay = to_chunks(g, chunk).cumsum(-1)
        lower = torch.ones(chunk, chunk, dtype=torch.bool).tril()
        pair = (decay[..., :, None] - decay[..., None, :]).masked_fill(~lower, float("-inf")).exp()
        a, qk = a * pair, qk * pair
        here, last = decay.exp()[..., None], decay[..., -1:]
        erase, read, write = k_beta * here, q * here, k * (last - decay).exp()[..., None]
        carry = last.exp()[..., None]
    # the diagonal is taken as one
    solved = torch.linalg.solve_triangular(a, torch.cat([v * b, erase], -1), upper=False, unitriangular=True)
    u, w = solved.split([value, key], -1)
    s = q.new_zeros(*q.shape[:2], key, value) if state is None else state.to(q.dtype)
    outputs = []
    for n in range(q.shape[2]):
        fresh = u[:, :, n] - w[:, :, n] @ s
        outputs.append(read[:, :, n] @ s + qk[:, :, n] @ fresh)
        s = (s if carry is None else s * carry[:, :, n]) + write[:, :, n].mT @ fresh
    return from_chunks(torch.stack(outputs, 2), length), s
