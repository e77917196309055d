"""What the CPU kernels share: precision, chunks and packed sequences.

Shape suffixes: B batch, T time, H heads, K key size, V value size, N chunks, C chunk length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def widen(x: Tensor) -> Tensor:
    """At least float32: half precisions go up, float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def to_chunks(x: Tensor, chunk: int) -> Tensor:
    """[B, T, H, ...] -> [B, H, N, C, ...], zero-padded at the end to at least one whole chunk."""
    length = x.shape[1]
    padding = chunk if length == 0 else -length % chunk
    if padding:
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, padding))
    return x.unflatten(1, (-1, chunk)).movedim(3, 1).contiguous()  # batched products copy anything else, each time


def from_chunks(x: Tensor, length: int) -> Tensor:
    """[B, H, N, C, D] -> [B, T, H, D]."""
    return x.movedim(1, 3).flatten(1, 2)[:, :length]


def by_sequence(
    kernel: Callable[..., tuple[Tensor, Tensor]],
    tensors: tuple[Tensor, ...],
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run `kernel(*tensors, state) -> (output, final state)`, each sequence on its own where they are packed.

    Args:
        tensors: each [B, T, ...], or [1, total, ...] with `cu_seqlens`.
        state: [B or N, ...] or None.
        cu_seqlens: [N + 1] bounds of the packed sequences.

    Returns:
        Output as the tensors are laid out, final state [B or N, ...].
    """
    if cu_seqlens is None:
        return kernel(*tensors, state)
    lengths: list[int] = cu_seqlens.diff().tolist()
    if lengths[0] > 0 and len(set(lengths)) == 1:  # one batch; decoding takes this way
        output, final = kernel(*(x.unflatten(1, (-1, lengths[0])).squeeze(0) for x in tensors), state)
        return output.flatten(0, 1)[None], final
    pieces = zip(*(x.split(lengths, 1) for x in tensors), strict=True)
    results: list[tuple[Any, Any]] = [
        kernel(*piece, None if state is None else state[i : i + 1]) for i, piece in enumerate(pieces)
    ]
    return torch.cat([output for output, _ in results], 1), torch.cat([final for _, final in results])
