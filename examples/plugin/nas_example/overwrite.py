"""The task's half with torch: sequences and labels."""

from __future__ import annotations

import torch
from torch import Tensor

from nas.workload import BYTES
from nas_example.entries import Overwrite

FILLER, IGNORED = ord("\n"), -100


def generate(
    spec: Overwrite, size: int, sequences: int, length: int, generator: torch.Generator, repeat: bool
) -> tuple[Tensor, Tensor]:
    """Every key with a first value, every key with a second one, then the questions.

    Args:
        size: keys in a sequence.
        repeat: in training the questions repeat to the end of the sequence; in evaluation each is asked once.

    Returns:
        input_ids and labels, int64 [sequences, length], on the generator's device; the label of an answer stands at
        its question, every other label is -100.
    """
    device = generator.device

    def shuffled(rows: int, count: int) -> Tensor:
        return torch.rand(rows, count, generator=generator, device=device).argsort(1)

    keys = shuffled(sequences, spec.keys)[:, :size] + BYTES
    values = torch.randint(spec.values, (2, sequences, size), generator=generator, device=device) + BYTES + spec.keys
    rounds = max(1, (length // 2 - 2 * size) // size) if repeat else 1
    asked = torch.stack([shuffled(sequences, size) for _ in range(rounds)], 1).flatten(1)
    questions, answers = keys.gather(1, asked), values[1].gather(1, asked)
    orders = [torch.arange(size, device=device).expand(sequences, size), shuffled(sequences, size)]
    shown = [
        torch.stack([keys.gather(1, o), v.gather(1, o)], -1).flatten(1) for o, v in zip(orders, values, strict=True)
    ]
    used = torch.cat([*shown, torch.stack([questions, answers], -1).flatten(1)], 1)
    input_ids = torch.full((sequences, length), FILLER, device=device)
    labels = torch.full_like(input_ids, IGNORED)
    input_ids[:, : used.shape[1]] = used
    labels[:, 4 * size : used.shape[1] : 2] = answers
    return input_ids, labels
