"""The learning-rate schedule: a pure function of the step, the same for every rung (design.md 4)."""

from __future__ import annotations

import math

from nas.architecture import Recipe


def multiplier(step: int, recipe: Recipe) -> float:
    """What the learning rate of update `step` (from 0) is multiplied by: linear warm-up, hold, minus-sqrt decay.

    The decay covers the last `decay_fraction` of `total_steps` and reaches 0 at `total_steps` (P2's WSD schedule:
    1 - sqrt of the way gone).
    """
    warmup = min(1.0, (step + 1) / recipe.warmup_steps) if recipe.warmup_steps else 1.0
    decay_steps = round(recipe.decay_fraction * recipe.total_steps)
    gone = step - (recipe.total_steps - decay_steps)
    if gone <= 0:
        return warmup
    return min(warmup, max(0.0, 1 - math.sqrt(gone / decay_steps)))
