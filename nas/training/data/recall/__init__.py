"""Recall tasks: one file each, joined to its workload by the task's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from nas.training.data.recall import mqar
from nas.workload import MQAR


class Generator(Protocol):
    """Makes sequences of one task at one size, without a loop over them."""

    def __call__(
        self, spec: MQAR, size: int, sequences: int, length: int, generator: torch.Generator, repeat: bool
    ) -> tuple[Tensor, Tensor]:
        """input_ids and labels, both int64 [sequences, length], on the generator's device.

        With `repeat` (training) the queries repeat to the end of the sequence; without it each is asked once.
        labels[b, t] is the target of the prediction made at position t, -100 where there is none.
        """
        ...


GENERATORS: Mapping[str, Generator] = {"mqar": mqar.generate}
