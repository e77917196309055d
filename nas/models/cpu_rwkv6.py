"""RWKV-6 on a CPU, by the kernel of gated linear attention.

With S_t = Diag(exp w_t) S_{t-1} + k_t v_t', RWKV-6 reads the state before its token and the token through a bonus:
o_t = r_t' S_{t-1} + (r_t . u k_t) v_t' (Peng et al., arXiv:2404.05892, section 4). GLA reads S_t with q_t, so its
queries are those of the next token, and the first output reads the initial state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .cpu_gla import gla
from .cpu_layout import by_sequence, widen


def rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """fla's `chunk_rwkv6`: r, k and log decays w [B, T, H, K], v [B, T, H, V], bonus u [H, K].

    Returns:
        o [B, T, H, V] in v's dtype and the state [N, H, K, V] or None.
    """
    scaled = widen(r) * (r.shape[-1] ** -0.5 if scale is None else scale)
    o, state = by_sequence(_read_before_writing, (scaled, widen(k), widen(v), widen(w)), initial_state, cu_seqlens)
    bonus = (scaled * widen(k) * widen(u)).sum(-1, keepdim=True) * widen(v)
    return (o + bonus).to(v.dtype), state if output_final_state else None


def _read_before_writing(r: Tensor, k: Tensor, v: Tensor, w: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """r (scaled), k, w [B, T, H, K], v [B, T, H, V] -> r_t' S_{t-1} [B, T, H, V], S [B, H, K, V]."""
    first = torch.zeros_like(v[:, :1])
    if state is not None:
        first = first + torch.einsum("bthk,bhkv->bthv", r[:, :1], state.to(r.dtype))
    # the last position reads nothing that is used: its query, rolled round from the first, is dropped again
    later, final = gla(r.roll(-1, 1), k, v, w, scale=1, initial_state=state, output_final_state=True)
    assert final is not None
    return torch.cat([first, later[:, :-1]], 1), final
