"""Multi-query associative recall (Arora et al., arXiv:2312.04927)."""

from __future__ import annotations

import torch
from torch import Tensor

from nas.workload import BYTES, MQAR

IGNORED = -100
"""Label of a position without a target: cross_entropy's default."""
FILLER = ord("\n")


def generate(spec: MQAR, size: int, sequences: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`size` keys each followed by its value, then every key once more in random order, each followed by its answer.

    Keys are ids 256 to 256 + keys - 1, different within a sequence; values are the next `values` ids, drawn
    independently and uniformly, so that neither the alphabet nor the other answers say anything about an answer and
    chance is 1 / values exactly. The queries stand at random places of the rest of the sequence; the gaps are filled
    with newlines, as in Zoology, so that distance varies. The label of an answer stands at its query.

    Returns:
        input_ids and labels, int64 [sequences, length]: labels[b, t] is the target of the prediction at t, else -100.

    Raises:
        ValueError: the sequence is too short for `size` pairs and queries.
    """
    slots = length // 2 - size  # two tokens each, after the pairs
    if slots < size:
        raise ValueError(f"sequence_length={length} is too short for {size} pairs; needs at least {4 * size}")
    device = generator.device
    keys = _permutations(sequences, spec.keys, generator)[:, :size] + BYTES
    values = torch.randint(spec.values, (sequences, size), generator=generator, device=device) + BYTES + spec.keys
    order = _permutations(sequences, size, generator)
    places = _permutations(sequences, slots, generator)[:, :size].sort(dim=1).values
    queries = 2 * (size + places)  # position of each query; its answer follows

    input_ids = torch.full((sequences, length), FILLER, device=device)
    input_ids[:, 0 : 2 * size : 2] = keys
    input_ids[:, 1 : 2 * size : 2] = values
    answers = values.gather(1, order)
    input_ids.scatter_(1, queries, keys.gather(1, order))
    input_ids.scatter_(1, queries + 1, answers)
    labels = torch.full_like(input_ids, IGNORED).scatter_(1, queries, answers)
    return input_ids, labels


def _permutations(rows: int, size: int, generator: torch.Generator) -> Tensor:
    """[rows, size]: a random permutation of 0..size-1 in each row."""
    return torch.rand(rows, size, generator=generator, device=generator.device, dtype=torch.float64).argsort(dim=1)
