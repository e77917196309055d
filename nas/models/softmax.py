"""Softmax attention on PyTorch's SDPA: grouped keys and values, rotary positions or none, an optional window and norm.

fla's `Attention` needs flash-attn; parameter names and the cache layout here are the same as there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cpu_layout import widen
from .upstream import Cache, RMSNorm


class SoftmaxAttention(nn.Module):
    """Causal softmax attention (Vaswani et al., arXiv:1706.03762; GQA, arXiv:2305.13245; RoPE, arXiv:2104.09864;
    QK-norm, arXiv:2010.04245, with RMSNorm as in Qwen3, arXiv:2505.09388).

    Args:
        hidden_size: width of the residual stream.
        num_heads: query heads.
        head_dim: size of one head; even where `rope_theta` is set.
        num_kv_heads: key/value heads; divides `num_heads`.
        layer_idx: position in the stack, the key into the cache.
        window: keys a query sees, itself included; None for all.
        rope_theta: base of the rotary frequencies; None for no positions.
        qk_norm: RMSNorm over each head's query and key before the rotation; heads share one weight vector of head_dim
            for queries and one for keys.
        norm_eps: epsilon of these norms.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int,
        layer_idx: int,
        window: int | None = None,
        rope_theta: float | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.grouped = num_kv_heads != num_heads
        self.layer_idx = layer_idx
        self.window = window
        self.rope_theta = rope_theta
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.qk_norm = qk_norm
        if qk_norm:
            self.q_norm = RMSNorm(head_dim, eps=norm_eps)
            self.k_norm = RMSNorm(head_dim, eps=norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Cache | None]:
        """Attend over the cache and the new tokens.

        Args:
            hidden_states: [B, T, hidden_size].
            attention_mask: [B, past + T], 0 at left padding; None where nothing is padded.
            past_key_values: cache to read and extend.

        Returns:
            Output [B, T, hidden_size], None (weights are never formed) and the cache.

        Raises:
            ValueError: `cu_seqlens` is given; packed sequences are not supported here.
        """
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens is not supported by softmax layers; pass padded sequences and attention_mask")
        length = hidden_states.shape[1]
        past = past_key_values.get_seq_length(self.layer_idx) if past_key_values is not None else 0
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        q, k = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_theta is not None:
            positions = _positions(attention_mask, past, length, q.device)
            cos, sin = _rotary_tables(positions, self.head_dim, self.rope_theta, q.dtype)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        k = k.flatten(-2)
        if past_key_values is not None:
            k, v = self._extend(past_key_values, k, v, past)
        k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (k, v))
        causal, mask = self._mask(attention_mask, length, k.shape[2], q.device)
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=mask, is_causal=causal, enable_gqa=self.grouped
        )
        return self.o_proj(o.transpose(1, 2).flatten(-2)), None, past_key_values

    def _extend(self, cache: Cache, k: Tensor, v: Tensor, past: int) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, T, kv_heads * head_dim] to the cache; return what the T new tokens can see."""
        old = cache[self.layer_idx]["attn_state"] if past else None
        seen = (k, v) if old is None else (torch.cat([old[0], k], 1), torch.cat([old[1], v], 1))
        cache.update(
            layer_idx=self.layer_idx,
            attn_state=(k, v),
            offset=k.shape[1],
            cache_kwargs={"window_size": self.window},
        )
        if self.window is None:
            return seen
        reach = self.window + k.shape[1] - 1  # of the first of the new tokens back to the first key it sees
        return seen[0][:, -reach:], seen[1][:, -reach:]

    def _mask(self, padding: Tensor | None, length: int, keys: int, device: torch.device) -> tuple[bool, Tensor | None]:
        """(is_causal, mask) for SDPA; the mask is True where a query may look: [T, keys] or [B, 1, T, keys]."""
        windowed = self.window is not None and keys > self.window
        if padding is None and not windowed and length in (1, keys):
            return length == keys, None
        query = torch.arange(keys - length, keys, device=device)[:, None]
        key = torch.arange(keys, device=device)
        allowed = key <= query
        if self.window is not None:
            allowed &= key > query - self.window
        if padding is None:
            return False, allowed
        # a padded query looks at itself, so that its softmax is defined
        return False, (allowed & padding[:, None, None, -keys:].bool()) | (key == query)


def _positions(padding: Tensor | None, past: int, length: int, device: torch.device) -> Tensor:
    """Positions of the new tokens, counted from the first unpadded one: [T] or [B, T]."""
    if padding is None:
        return torch.arange(past, past + length, device=device)
    return (padding.cumsum(-1) - 1).clamp(min=0)[:, -length:]


def _rotary_tables(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine [..., T, 1, head_dim / 2] in `dtype`, computed in at least float32."""
    wide = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=wide) / head_dim
    angle = (positions[..., None].to(wide) * theta**-exponent)[..., None, :]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of x [B, T, H, D] by the tabled angles, rounding once at the end as fla does."""
    a, b = widen(x).chunk(2, -1)
    cos, sin = widen(cos), widen(sin)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
