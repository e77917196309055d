"""Retention on a CPU: chunks with one constant decay a head (Sun et al., arXiv:2307.08621, section 2.1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .cpu_layout import by_sequence, from_chunks, to_chunks, widen

_CHUNK = 64


def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """fla's `chunk_retention`: q, k [B, T, H, K], v [B, T, H, V]; head h decays by 1 - 2^(-5 - h) a step.

    Returns:
        o [B, T, H, V] in v's dtype and the state [N, H, K, V] ([N, H, V, K] with `state_v_first`) or None.
    """
    scaled = widen(q) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if state_v_first and initial_state is not None:
        initial_state = initial_state.transpose(-1, -2)
    o, state = by_sequence(_chunked, (scaled, widen(k), widen(v)), initial_state, cu_seqlens)
    if not output_final_state:
        return o.to(v.dtype), None
    return o.to(v.dtype), state.transpose(-1, -2).contiguous() if state_v_first else state


def _chunked(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    length, heads = q.shape[1:3]
    s = q.new_zeros(q.shape[0], heads, q.shape[-1], v.shape[-1]) if state is None else state.to(q.dtype)
    if length == 0:
        return v, s
    chunk = min(_CHUNK, length)
    log_decay = torch.log1p(-(2.0 ** -(5 + torch.arange(heads, dtype=q.dtype))))[:, None]  # [H, 1]
    step = torch.arange(chunk, dtype=q.dtype)
    pair = ((step[:, None] - step) * log_decay[..., None]).exp().tril()  # [H, C, C]
    q, k, v = (to_chunks(x, chunk) for x in (q, k, v))
    o = ((q @ k.mT) * pair[:, None]) @ v
    outputs = []
    for n in range(q.shape[2]):
        filled = min(chunk, length - n * chunk)
        since = (log_decay * (step + 1)).exp()[..., None]  # [H, C, 1]: from the chunk's start to each step
        until = (log_decay * (filled - 1 - step).clamp(min=0)).exp()[..., None]  # from each step to the chunk's end
        outputs.append(o[:, :, n] + (q[:, :, n] * since) @ s)
        s = s * (log_decay * filled).exp()[..., None] + (k[:, :, n] * until).mT @ v[:, :, n]
    return from_chunks(torch.stack(outputs, 2), length), s
