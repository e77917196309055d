"""How much a search trains, and what it takes: expectations from closed forms, for `--dry-run` and the live view."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from nas.cost import cost
from search_spaces import SearchSpace
from search_spaces.designs import architectures, baselines

FLOPS_PER_CORE = 20e9
"""Assumed sustained FLOP/s of a CPU core: 1.2 M parameters at 6,000 tokens/s on two cores, measured, is 22e9 a core."""
FLOPS_PER_GPU = 10e12
"""Assumed sustained FLOP/s of a GPU: proxies are small, and far from its peak."""
BYTES_PER_PARAMETER = 16
"""Of a checkpoint: weights, their moving average and AdamW's two moments, each in float32."""
CHECKPOINTS_KEPT = 2
"""A trial keeps its last two checkpoints (nas.training.checkpoints)."""


@dataclass(frozen=True)
class Estimate:
    """What `trials` trials of a space take. `reached` counts the trials expected at every rung."""

    reached: tuple[float, ...]
    steps: float
    tokens: float
    flops: float
    disk_bytes: int

    def seconds(self, flops_per_second: float) -> float:
        """Training time at a sustained FLOP/s of all workers together; start-up and evaluation come on top."""
        return self.flops / flops_per_second


def expected_at_rungs(space: SearchSpace, trials: int) -> list[float]:
    """Trials expected to train towards each rung: baselines all the way, 1/reduction of the others at each rung."""
    protected = min(trials, len(baselines(space)))
    keep = 1.0 if space.grid else 1 / space.rungs.reduction
    return [protected + (trials - protected) * keep**rung for rung in range(len(space.rungs.steps))]


def expected_steps(space: SearchSpace, trials: int) -> float:
    """Training steps of a whole study, all trials together."""
    steps = space.rungs.steps
    lengths = (stop - start for start, stop in zip((0, *steps), steps, strict=False))
    return sum(count * length for count, length in zip(expected_at_rungs(space, trials), lengths, strict=True))


def estimate(space: SearchSpace, trials: int) -> Estimate:
    """FLOPs are those of the mean design of the space, disk that of its largest."""
    proxy, designs = space.proxy, architectures(space)
    prices = [cost(design, proxy.sequence_length, "float32") for design in designs]
    steps = expected_steps(space, trials)
    tokens = steps * proxy.batch_size * proxy.sequence_length
    return Estimate(
        reached=tuple(expected_at_rungs(space, trials)),
        steps=steps,
        tokens=tokens,
        flops=tokens * fmean(price.training_flops_per_token for price in prices),
        disk_bytes=trials * CHECKPOINTS_KEPT * BYTES_PER_PARAMETER * max(price.parameters for price in prices),
    )
