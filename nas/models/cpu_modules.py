"""fla's small modules in plain PyTorch: norms, SwiGLU, rotary positions, short convolution, token shift.

Signatures are fla's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu_layout import by_sequence, widen


def l2norm(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last axis: fla's epsilon stands inside the root."""
    x = widen(x)
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm over the last axis of x + residual; with `prenorm` also that sum."""
    if residual is not None:
        x = x + residual
    y = F.rms_norm(widen(x), x.shape[-1:], None if weight is None else widen(weight), eps)
    y = (y if bias is None else y + bias).to(x.dtype)
    return (y, widen(x) if residual_in_fp32 else x) if prenorm else y


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm(x + residual) * act(g), act SiLU or sigmoid; with `prenorm` also the sum."""
    gate = torch.sigmoid(widen(g)) if activation == "sigmoid" else F.silu(widen(g))
    normed = rms_norm(widen(x), weight, bias, residual, eps, True, residual_in_fp32)
    y = (normed[0] * gate).to(x.dtype)
    return (y, normed[1]) if prenorm else y


def rms_norm_after_gate(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """Mamba-2's norm, fla's `rmsnorm_fn`: RMSNorm over groups of the last axis, with a SiLU gate z on its input.

    With `norm_before_gate` the gate is on its output instead.
    """
    y = widen(x)
    if z is not None and not norm_before_gate:
        y = y * F.silu(widen(z))
    groups = y.unflatten(-1, (-1, group_size or x.shape[-1]))
    y = F.rms_norm(groups, groups.shape[-1:], None, eps).flatten(-2) * widen(weight)
    if bias is not None:
        y = y + widen(bias)
    if z is not None and norm_before_gate:
        y = y * F.silu(widen(z))
    return y.to(x.dtype)


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise each group of the last axis of x + residual, then scale and shift; with `prenorm` also that sum."""
    if residual is not None:
        x = x + residual
    groups = widen(x).unflatten(-1, (num_groups, -1))
    y = (F.rms_norm if is_rms_norm else F.layer_norm)(groups, groups.shape[-1:], eps=eps).flatten(-2)
    y = y if weight is None else y * widen(weight)
    y = (y if bias is None else y + widen(bias)).to(x.dtype)
    return (y, widen(x) if residual_in_fp32 else x) if prenorm else y


def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Linear(RMSNorm(x + residual)); with `prenorm` also the sum."""
    normed = rms_norm(x, norm_weight, norm_bias, residual, eps, True, residual_in_fp32)
    y = F.linear(normed[0], linear_weight, linear_bias)
    return (y, normed[1]) if prenorm else y


def swish(x: Tensor) -> Tensor:
    return F.silu(x)


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y


def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(F.silu(x) * y, weight, bias)


def rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """Rotate the first R of D features of x [B, T, H, D] by tables cos, sin [positions, R / 2].

    Positions count from `seqlen_offsets` (one, or one a sequence) in each row, or in each packed sequence.
    """
    total = x.shape[1]
    offsets = torch.as_tensor(seqlen_offsets, device=x.device)
    if cu_seqlens is None:
        positions = offsets.reshape(-1, 1) + torch.arange(total, device=x.device)
    else:
        lengths = cu_seqlens.diff()
        first = (offsets - cu_seqlens[:-1]).repeat_interleave(lengths, output_size=total)
        positions = (first + torch.arange(total, device=x.device))[None]
    c, s = (table[positions][:, :, None] for table in (cos, sin))
    rotated, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    a, b = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
    pair = (a * c - b * s, b * c + a * s)
    y = torch.cat([torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1), rest], -1)
    return x.copy_(y) if inplace else y


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Depthwise causal convolution of x [B, T, D] with weight [D, W]; states hold the last W inputs: [N, D, W]."""

    width = weight.shape[1]

    def convolve(x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        past = x.new_zeros(x.shape[0], width, x.shape[2]) if state is None else state.transpose(1, 2).to(x.dtype)
        final = x.new_empty(0)
        if output_final_state:
            final = torch.cat([past, x[:, -width:]], 1)[:, -width:].transpose(1, 2).contiguous()
        if x.shape[1] == 0:  # a sequence that is all padding
            return x, final
        seen = torch.cat([past[:, 1:], x], 1).transpose(1, 2)[:, :, None]  # a channels-last image: no copy, fast kernel
        return F.conv2d(seen, weight[:, None, None], groups=x.shape[2])[:, :, 0].transpose(1, 2), final

    y, final = by_sequence(convolve, (x,), initial_state, cu_seqlens)
    if bias is not None:
        y = y + bias
    if activation is not None:
        y = F.silu(y)
    if residual is not None:
        y = y + residual
    return y, final if output_final_state else None


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    *,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One token a sequence, x [N, 1, D] or [1, N, D]; `cache` [N, D, W] is shifted in place, as fla does."""
    token = x.reshape(cache.shape[0], -1)
    cache.copy_(torch.cat([cache[..., 1:], token[..., None].to(cache.dtype)], -1))
    y = (cache * weight).sum(-1).to(x.dtype)
    if bias is not None:
        y = y + bias
    if activation is not None:
        y = F.silu(y)
    y = y.reshape(x.shape)
    return (y if residual is None else y + residual), cache


def token_shift(x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """The previous token minus this one, x [B, T, D]; before the first token of a sequence stands zero."""
    previous = F.pad(x, (0, 0, 1, -1))
    if cu_seqlens is not None:
        starts = cu_seqlens[:-1]
        previous = previous.index_fill(1, starts[starts < x.shape[1]], 0)
    return previous - x
