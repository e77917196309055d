"""Cross-layer value routing, CLVR (arXiv:2607.07953): the values of a delta-rule layer join the residual stream.

After the whole layer l, mixer and MLP, h <- h + P_l v_l. v_l is the layer's value after projection, short convolution
and SiLU, before the kernel: [B, T, value heads * value head size]. P_l is zero at initialisation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .upstream import get_unpad_indices_and_cu, repad_hidden_states


class RoutingLinear(nn.Linear):
    """A bias-free linear map that draws nothing from the global generator: zero, or N(0, std) with a `layer_idx`.

    The noise comes from a generator of its own, seeded by (global seed, layer), so that all weights shared with a
    model without routing stay bit-equal under one `torch.manual_seed`.
    """

    def __init__(self, in_features: int, out_features: int, layer_idx: int | None = None) -> None:
        self.layer_idx = layer_idx
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self, std: float = 0.02) -> None:
        if self.layer_idx is None:
            init.zeros_(self.weight)
            return
        generator = torch.Generator().manual_seed((torch.initial_seed() + 1_000_003 * (self.layer_idx + 1)) % 2**63)
        init.copy_(self.weight, torch.randn(self.weight.shape, generator=generator, device="cpu") * std)


class ValueRoute(nn.Module):
    """P_l: value_size -> hidden_size, zero at the start; `rank` factors it into a random `down` and a zero `up`."""

    def __init__(self, value_size: int, hidden_size: int, layer_idx: int, rank: int | None = None) -> None:
        super().__init__()
        self.down = None if rank is None else RoutingLinear(value_size, rank, layer_idx)
        self.up = RoutingLinear(rank or value_size, hidden_size)

    def forward(self, value: Tensor) -> Tensor:
        """value [B, T, value_size] -> its part of the residual stream [B, T, hidden_size]."""
        return self.up(value if self.down is None else self.down(value))


def prepare_source(mixer: nn.Module) -> None:
    """Make a delta-rule mixer run its value convolution as a module of its own in every mode.

    Gated DeltaNet fuses the three convolutions in training and not in decoding; `capture_value` must see both.
    """
    if hasattr(mixer, "_use_fused_qkv_conv"):
        setattr(mixer, "_use_fused_qkv_conv", _never)  # noqa: B010 (torch types attributes as modules)


def _never(**_: object) -> bool:
    return False


@contextmanager
def capture_value(mixer: nn.Module) -> Iterator[list[Tensor]]:
    """Within the block, one call of `mixer` appends its value: [B, T, value] or, under a mask, [1, tokens, value].

    The hook lives for one call only, so copies, checkpointed recomputation and threads of other models share nothing.
    """
    values: list[Tensor] = []
    convolution = getattr(mixer, "v_conv1d", None)
    if convolution is not None:
        handle = convolution.register_forward_hook(lambda module, args, output: values.append(output[0]))
    else:
        handle = mixer.get_submodule("v_proj").register_forward_hook(
            lambda module, args, output: values.append(F.silu(output))
        )
    try:
        yield values
    finally:
        handle.remove()


def pad_value(value: Tensor, attention_mask: Tensor | None, batch: int, length: int) -> Tensor:
    """Bring a value that fla unpadded ([1, tokens, value]) back to [B, T, value], zero at padding."""
    if attention_mask is None:
        return value
    indices, _ = get_unpad_indices_and_cu(attention_mask, length)
    return repad_hidden_states(value, indices, batch, length)
