"""Linear attention with one decay a head (Mamba-2, RetNet) on a CPU: chunks with a matrix of decays between tokens.

Within a chunk o_i = sum_{j<=i} D_ij (q_i . k_j) v_j + exp(g_1 + .. + g_i) q_i S with D_ij = exp(g_{j+1} + .. + g_i)
(Dao and Gu, arXiv:2405.21060, section 6). The exponents are sums of log decays <= 0, never differences of running sums,
so nothing overflows and nothing cancels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .cpu_layout import by_sequence, from_chunks, to_chunks, widen

_CHUNK = 64


def simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """fla's `chunk_simple_gla`: q, k [B, T, H, K], v [B, T, H, V], log decays g [B, T, H] or constant g_gamma [H].

    Returns:
        o [B, T, H, V] in v's dtype and the state [N, H, K, V] ([N, H, V, K] with `state_v_first`) or None.
    """
    scaled = widen(q) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if g is None:
        constant = q.new_zeros(q.shape[2]) if g_gamma is None else g_gamma
        g = constant.expand(1, q.shape[1], -1)
    if state_v_first and initial_state is not None:
        initial_state = initial_state.transpose(-1, -2)
    decay = widen(g).to(scaled.dtype)
    o, state = by_sequence(_chunked, (scaled, widen(k), widen(v), decay), initial_state, cu_seqlens)
    if not output_final_state:
        return o.to(v.dtype), None
    return o.to(v.dtype), state.transpose(-1, -2).contiguous() if state_v_first else state


def retention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    """fla's `chunk_retention`: head h decays by 1 - 2^(-5 - h) a step (Sun et al., arXiv:2307.08621, section 2.1).

    Shapes and options are those of `simple_gla`.
    """
    heads = torch.arange(q.shape[2], dtype=widen(q).dtype, device=q.device)
    return simple_gla(q, k, v, g_gamma=torch.log1p(-(2.0 ** -(5 + heads))), **options)


def _chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """q (scaled), k [B, T, H, K], v [B, T, H, V], g [B or 1, T, H] -> o [B, T, H, V], S [B, H, K, V]."""
    length = q.shape[1]
    s = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]) if state is None else state.to(q.dtype)
    if length == 0:
        return v, s
    chunk = min(_CHUNK, length)
    q, k, v, g = (to_chunks(x, chunk) for x in (q, k, v, g))
    between = g[..., None].expand(*g.shape, chunk).tril(-1).cumsum(-2)  # [B, H, N, C, C]: the decays after j up to i
    until = between[..., -1, :, None].exp()  # [B, H, N, C, 1]: from each token to the chunk's end
    since = g.cumsum(-1).exp()[..., None]  # from the chunk's start to each token
    o = ((q @ k.mT) * between.exp().tril()) @ v
    read, write, carry = q * since, (k * until).mT, since[..., -1:, :]
    outputs = []
    for n in range(q.shape[2]):
        outputs.append(o[:, :, n] + read[:, :, n] @ s)
        s = s * carry[:, :, n] + write[:, :, n] @ v[:, :, n]
    return from_chunks(torch.stack(outputs, 2), length), s
