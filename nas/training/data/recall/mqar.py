"""Multi-query associative recall (Arora et al., arXiv:2312.04927)."""

from __future__ import annotations

import torch
from torch import Tensor

from nas.tasks import MQAR
from nas.workload import BYTES

IGNORED = -100
"""Label of a position without a target: cross_entropy's default."""
FILLER = ord("\n")


def generate(
    spec: MQAR, size: int, sequences: int, length: int, generator: torch.Generator, repeat: bool
) -> tuple[Tensor, Tensor]:
    """`size` keys each followed by its value, then every key once more in random order, each followed by its answer.

    Keys are ids 256 to 256 + keys - 1, different within a sequence; values are the next `values` ids, drawn
    independently and uniformly, so that neither the alphabet nor the other answers say anything about an answer and
    chance is 1 / values exactly. The label of an answer stands at its query.

    Args:
        repeat: what fills the rest. True, for training: the queries again, in a new random order each round, all
            labelled (what that changed: LOG.md, "The CPU demo"). False, for evaluation: newlines, so that no answer
            can be copied from an earlier one.

    Returns:
        input_ids and labels, int64 [sequences, length]: labels[b, t] is the target of the prediction at t, else -100.

    Raises:
        ValueError: the sequence is too short for `size` pairs and queries.
    """
    if length < 4 * size:
        raise ValueError(f"sequence_length={length} is too short for {size} pairs; needs at least {4 * size}")
    device = generator.device
    asked = length // 2 - size if repeat else size
    keys = _permutations(sequences, spec.keys, generator)[:, :size] + BYTES
    values = torch.randint(spec.values, (sequences, size), generator=generator, device=device) + BYTES + spec.keys
    rounds = -(-asked // size)
    order = _permutations(sequences * rounds, size, generator).view(sequences, rounds * size)[:, :asked]

    shown_end, asked_end = 2 * size, 2 * (size + asked)
    input_ids = torch.full((sequences, length), FILLER, device=device)
    labels = torch.full_like(input_ids, IGNORED)
    input_ids[:, 0:shown_end:2] = keys
    input_ids[:, 1:shown_end:2] = values
    input_ids[:, shown_end:asked_end:2] = keys.gather(1, order)
    input_ids[:, shown_end + 1 : asked_end : 2] = values.gather(1, order)
    labels[:, shown_end:asked_end:2] = values.gather(1, order)
    return input_ids, labels


def _permutations(rows: int, size: int, generator: torch.Generator) -> Tensor:
    """[rows, size]: a random permutation of 0..size-1 in each row."""
    return torch.rand(rows, size, generator=generator, device=generator.device, dtype=torch.float64).argsort(dim=1)
