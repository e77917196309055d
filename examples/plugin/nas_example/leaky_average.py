"""The mixer's half with torch. The layer has the signature of flash-linear-attention's layers, and their cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class LeakyAverage(nn.Module):
    """h_t = a h_{t-1} + (1 - a) v_t with one decay a in (0, 1) a channel; o_t = W (h_t * silu(g_t))."""

    def __init__(self, hidden_size: int, value_size: int, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.v_proj = nn.Linear(hidden_size, value_size, bias=False)
        self.g_proj = nn.Linear(hidden_size, value_size, bias=False)
        self.o_proj = nn.Linear(value_size, hidden_size, bias=False)
        self.decay = nn.Parameter(torch.linspace(-2.0, 4.0, value_size))  # logits

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Any]:
        """hidden_states [B, T, hidden_size] -> the same shape, None, and the cache, which keeps h [B, value_size]."""
        x = self.v_proj(hidden_states)
        length = x.shape[1]
        decay = self.decay.sigmoid().to(x.dtype)
        x = x * (1 - decay)
        if attention_mask is not None:  # h is zero before the first token, so padding only needs empty values
            x = x * attention_mask[:, -length:, None].to(x.dtype)
        ages = torch.arange(length, device=x.device)
        weights = (
            decay ** (ages[:, None] - ages).clamp(min=0)[..., None]
        )  # [T, T, value_size]: fine for short sequences
        weights = weights.masked_fill((ages[:, None] < ages)[..., None], 0)
        h = torch.einsum("tsd,bsd->btd", weights, x)
        if past_key_values is not None and len(past_key_values) > self.layer_idx:
            before = past_key_values[self.layer_idx]["recurrent_state"]
            h = h + decay ** (ages[:, None] + 1) * before[:, None]
        if use_cache:
            past_key_values.update(recurrent_state=h[:, -1].float(), layer_idx=self.layer_idx, offset=length)
        return self.o_proj(h * nn.functional.silu(self.g_proj(hidden_states))), None, past_key_values


def build(layer: Mapping[str, Any], hidden_size: int, layer_idx: int, norm_eps: float) -> nn.Module:
    return LeakyAverage(hidden_size, layer["heads"] * round(layer["head_dim"] * layer["expand_v"]), layer_idx)


def register(add: Callable[..., None]) -> None:
    """Called by nas with `nas.models.mixers.register` when a model first needs the mixer."""
    add("leaky_average", build, linear=False)  # linear: whether routing may read its values
