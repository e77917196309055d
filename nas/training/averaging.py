"""The exponential moving average of a model's weights that lower rungs are scored on (design.md 4)."""

from __future__ import annotations

import copy

import torch
from torch import nn


def decay(step: int, total_steps: int) -> float:
    """Decay after update `step` (from 0): it remembers about the last thirtieth of the run, fewer at the start.

    The long-run value 1 - 30 / total_steps is held between .9 and .999: at the demo's 300 steps the average lags
    10 steps behind, so that a sudden rise of recall is not hidden.
    """
    return min(max(0.9, min(0.999, 1 - 30 / total_steps)), (1 + step) / (10 + step))


class Average:
    """A copy of `model` whose weights follow those of `model`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self._averages = [parameter.detach() for parameter in self.model.parameters()]
        self._weights = [parameter.detach() for parameter in model.parameters()]

    def update(self, decay: float) -> None:
        torch._foreach_lerp_(self._averages, self._weights, 1 - decay)
