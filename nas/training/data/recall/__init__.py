"""Recall tasks: one file each, joined to its workload by the task's name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol

import torch
from torch import Tensor

from nas.training.data.recall import mqar


class Generator(Protocol):
    """Makes sequences of one task at one size, without a loop over them."""

    def __call__(
        self, spec: Any, size: int, sequences: int, length: int, generator: torch.Generator, repeat: bool
    ) -> tuple[Tensor, Tensor]:
        """input_ids and labels, both int64 [sequences, length], on the generator's device.

        `spec` is the task's own class. With `repeat` (training) the queries repeat to the end of the sequence; without
        it each is asked once. labels[b, t] is the target of the prediction made at position t, -100 where there is
        none.
        """
        ...


GENERATORS: Mapping[str, Generator] = {"mqar": mqar.generate}


@cache
def generator_of(task: str) -> Generator:
    """The generator of a recall task, ours or the one an installed package gives in `nas.task_generators`.

    Raises:
        ValueError: no generator of that name; says which entry point is missing.
    """
    if task in GENERATORS:
        return GENERATORS[task]
    for entry in entry_points(group="nas.task_generators", name=task):
        found: Generator = entry.load()
        return found
    raise ValueError(
        f"recall task {task!r} has no generator; its package must give the entry point "
        f"nas.task_generators:{task}, and be installed where workers run"
    )
