"""Scores under one decay a key channel, safe at any strength: shared by GLA, HGRN-2, KDA and Gated DeltaNet-2.

Within a chunk the score of query i on key j < i is sum_c x_ic k_jc a_{j+1,c} .. a_{i,c}, with decays a in [0, 1].
Pairs are split by levels: at level s = 1, 2, 4, .. chunks fall into blocks of 2 s, and queries of a right half meet
keys of the left half through the middle: (x decayed since the middle) . (k decayed until the middle). Only products of
decays occur, never a quotient, so nothing overflows and nothing cancels; all pairs cost log2(C) small matrix products
and no exponential (arXiv:2312.06635, section 4, has two levels).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Decayed(NamedTuple):
    """How the queries x [..., C, M, K] of chunks, M at each position, meet the keys k [..., C, K]."""

    scores: Tensor
    """[..., C, M, C]: the scores above, zero for j >= i."""
    read: Tensor
    """[..., C, M, K]: x decayed since the chunk's start, up to and with its own position."""
    write: Tensor
    """[..., C, K]: k decayed until the chunk's end, from after its own position."""
    carry: Tensor
    """[..., K, 1]: decay over the whole chunk."""
    levels: tuple[Tensor, ...]
    """For `decayed_gradients`, three tensors a level: right halves of x, left halves of k, decay over each half."""


def decayed_scores(x: Tensor, k: Tensor, a: Tensor) -> Decayed:
    """Meet queries x [..., C, M, K] with keys k [..., C, K] under decays a [..., C, K]; C is a power of two."""
    chunk, each = x.shape[-3:-1]
    scores = x.new_zeros(*x.shape[:-3], chunk * each, chunk)
    read, write = (x * a[..., None, :]).flatten(-3, -2), k.clone()
    half_decay, size = a, 1
    levels: list[Tensor] = []
    while size < chunk:
        right, left = halves(read, size * each)[1], halves(write, size)[0]
        levels += [right.clone(), left.clone(), half_decay]  # the views change below
        corner(scores, size * each, size).copy_(levels[-3] @ levels[-2].mT)
        first, second = halves(half_decay, 1)
        right *= first
        left *= second
        half_decay, size = (first * second).squeeze(-2), 2 * size
    by_position = (chunk, each)
    return Decayed(
        scores.unflatten(-2, by_position), read.unflatten(-2, by_position), write, half_decay.mT, tuple(levels)
    )


def decayed_gradients(
    levels: Sequence[Tensor], a: Tensor, scores: Tensor, read: Tensor, write: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients by x [..., C, M, K] and k [..., C, K], from those by `scores`, `read` and `write`.

    The last two are overwritten. Entries of the scores' gradient at j >= i are not looked at.
    """
    chunk, each = read.shape[-3:-1]
    scores, dx, size = scores.flatten(-3, -2), read.flatten(-3, -2), chunk
    for i in reversed(range(0, len(levels), 3)):
        x_right, k_left, half_decay = levels[i : i + 3]
        size //= 2
        right, left = halves(dx, size * each)[1], halves(write, size)[0]
        first, second = halves(half_decay, 1)
        pairs = corner(scores, size * each, size).contiguous()
        right.mul_(first).add_(pairs @ k_left)
        left.mul_(second).add_(pairs.mT @ x_right)
    dx = dx.unflatten(-2, (chunk, each))
    dx *= a[..., None, :]
    return dx, write


def log_decay_gradient(x: Tensor, dx: Tensor, k: Tensor, dk: Tensor, last: Tensor) -> Tensor:
    """Gradient by the log decays g [B, H, N, C, K] of all that decays join.

    Every decay enters as exp(G_i - G_j), G the running sum of g over all chunks: with x at i, with k at j.

    Args:
        x: [B, H, N, C, M, K], and k [B, H, N, C, K] with their gradients, without what no decay multiplies.
        last: [B, H, K], the final state times its gradient, summed over the values: it enters with G at the end.
    """
    running = ((x * dx).sum(-2) - k * dk).flatten(2, 3)
    return (running.flip(2).cumsum(2).flip(2) + last[:, :, None]).unflatten(2, k.shape[2:4])


def halves(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Views of the left and right halves of each block of 2 `size` rows: [..., R, K] -> two [..., blocks, size, K]."""
    left, right = x.unflatten(-2, (-1, 2, size)).unbind(-3)
    return left, right


def corner(a: Tensor, rows: int, columns: int) -> Tensor:
    """View of the lower left corner of each diagonal block of [2 `rows`, 2 `columns`]: [..., blocks, rows, columns]."""
    blocks = a.unflatten(-1, (-1, 2, columns)).unflatten(-4, (-1, 2, rows))  # [..., R, 2, rows, C, 2, columns]
    return blocks[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
