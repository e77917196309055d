"""Mamba-2 (Dao and Gu, arXiv:2405.21060): fla's layer and parameters with the state-space part on fla's linear kernels.

fla's own forward needs the package mamba_ssm or gigabytes, and takes no prompt on top of a cache. Its state-space part,
h_t = exp(-exp(A_log) dt_t) h_{t-1} + dt_t B_t x_t' and y_t = h_t' C_t, is linear attention with one decay a head:
queries C, keys dt B, values x, log decays -exp(A_log) dt.
"""

from __future__ import annotations

import logging
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu_layout import widen
from .upstream import (
    Cache,
    FLAMamba2,
    causal_conv1d,
    chunk_simple_gla,
    fused_recurrent_simple_gla,
    get_layer_cache,
    repad_hidden_states,
    unpad_hidden_states,
    update_layer_cache,
)

_RECURRENT_UP_TO = 64
"""Tokens a call for which the recurrent kernel is taken where no gradient is needed, as in fla's other layers."""


def _concerns_us(record: logging.LogRecord) -> bool:
    """False for fla's notes on forward passes that this file replaces."""
    ours = ("The fast path is not available", "The CUDA backend is not available", "Mamba2 does not recommend")
    return not record.getMessage().startswith(ours)


logging.getLogger("fla.layers.mamba2").addFilter(_concerns_us)


class Mamba2(FLAMamba2):
    """One Mamba-2 layer; parameters in_proj, conv1d, dt_bias, A_log, D, norm, out_proj are fla's.

    Args:
        hidden_size: width of the residual stream.
        n_groups: groups of B and C; value heads are shared out among them in order.
        state_size: size N of each B and C.
        num_heads, head_dim: heads H of x and their size P.
        conv_kernel: width of the causal convolution over x, B and C.
        layer_idx: position in the stack, the key into the cache.
        norm_eps: epsilon of the gated norm, whose groups are those of B and C.
    """

    def __init__(self, *, hidden_size: int, num_heads: int, head_dim: int, **options: Any) -> None:
        exact = Fraction(num_heads * head_dim, hidden_size)  # fla takes int(expand * hidden_size) for H * P
        super().__init__(
            hidden_size=hidden_size, num_heads=num_heads, head_dim=head_dim, expand=exact, backend="triton", **options
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Cache | None]:
        """hidden_states [B, T, hidden_size] -> the same shape.

        The cache holds the state [B, H, N, P] and the convolution's last inputs [B, H P + 2 G N, W].
        `attention_mask` [B, past + T] is 0 at left padding; `cu_seqlens` [sequences + 1] bounds sequences packed into
        B = 1.
        """
        batch, length, _ = hidden_states.shape
        past = get_layer_cache(self, past_key_values)
        x, indices, cu_seqlens = unpad_hidden_states(hidden_states, cu_seqlens, attention_mask, length)
        gate, xbc, dt = self.in_proj(x).split([self.intermediate_size, self.conv_dim, self.num_heads], -1)
        xbc, conv_state = causal_conv1d(
            x=xbc,
            weight=self.conv1d.weight.squeeze(1),
            bias=self.conv1d.bias,
            initial_state=past["conv_state"] if past is not None else None,
            output_final_state=use_cache,
            activation="silu",
            cu_seqlens=cu_seqlens,
        )
        state = past["recurrent_state"] if past is not None else None
        y, state = self._state_space(xbc, dt, state, bool(use_cache), cu_seqlens)
        update_layer_cache(self, past_key_values, recurrent_state=state, conv_state=conv_state, offset=length)
        y = self.out_proj(self.norm(y, gate).to(gate.dtype))
        return repad_hidden_states(y, indices, batch, length), None, past_key_values

    def _state_space(
        self, xbc: Tensor, dt: Tensor, state: Tensor | None, keep: bool, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """xbc [B, T, H P + 2 G N], dt [B, T, H], state [B, H, N, P] -> y [B, T, H P]; with `keep`, the last state."""
        group = self.n_groups * self.ssm_state_size
        v, b, c = xbc.split([self.intermediate_size, group, group], -1)
        v = v.unflatten(-1, (self.num_heads, self.head_dim))
        b, c = (
            x.unflatten(-1, (self.n_groups, -1)).repeat_interleave(self.num_heads // self.n_groups, 2) for x in (b, c)
        )
        dt = F.softplus(widen(dt) + self.dt_bias)
        kernel = fused_recurrent_simple_gla if v.shape[1] <= _RECURRENT_UP_TO else chunk_simple_gla
        if torch.is_grad_enabled():
            kernel = chunk_simple_gla
        y, state = kernel(
            q=c,
            k=(b * dt[..., None]).to(b.dtype),
            v=v,
            g=-widen(self.A_log).exp() * dt,
            scale=1.0,
            initial_state=state,
            output_final_state=keep,
            cu_seqlens=cu_seqlens,
        )
        return (y + v * self.D[:, None]).flatten(-2), state
