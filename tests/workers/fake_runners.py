"""Runners that the tests' workers import: they train nothing. The attempt's behaviour is written in `checkpoints`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from nas.messages import Failed, Failure, Finished, Measurement, Segment

Report = Callable[[tuple[Measurement, ...]], None]


def run(segment: Segment, report: Report, should_stop: Callable[[], bool]) -> Finished | Failed:
    """Reports one number a step, PAUSE seconds apart; `segment.study` names how the segment ends."""
    match segment.study:
        case "raise":
            raise ValueError("bad shape\nsecond line")
        case "exit":
            raise SystemExit(3)
        case "oom":
            raise MemoryError("8 GiB")
        case "diverge":
            return Failed(trial=segment.trial, attempt=segment.attempt, kind=Failure.DIVERGED, message="loss=nan")
        case "wrong":
            return None  # type: ignore[return-value]
        case "describe":
            return finished(segment, segment.stop_step, describe())
    pause = float(segment.study)
    step = segment.start_step
    while step < segment.stop_step and not should_stop():
        time.sleep(pause)
        step += 1
        report((Measurement(step=step, name="train_loss", value=1 / step),))
    return finished(segment, step, {"pid": os.getpid()})


def finished(segment: Segment, step: int, values: dict[str, float]) -> Finished:
    return Finished(
        trial=segment.trial,
        attempt=segment.attempt,
        step=step,
        checkpoint=f"step-{step}",
        seconds=0.0,
        measurements=tuple(Measurement(step=step, name=name, value=value) for name, value in values.items()),
    )


def describe() -> dict[str, float]:
    """What the process that runs segments looks like from the thread that trains."""
    import torch

    smallest = torch.tensor([1.2e-38])
    return {
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "omp": float(os.environ["OMP_NUM_THREADS"]),
        "denormal": float((smallest * 0.1).item()),
        "ignores_sigint": float(signal.getsignal(signal.SIGINT) is signal.SIG_IGN),
        "cuda_hidden": float(os.environ.get("CUDA_VISIBLE_DEVICES") == ""),
    }
