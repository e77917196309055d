"""A runner that trains nothing, for the tests' workers: `segment.study` says what it does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from nas.architecture import Architecture, Candidate, LayerSpec, Recipe
from nas.messages import Failed, Failure, Finished, Measurement, Segment
from nas.workload import Workload

RUNNER = "fake_runners:run"
Report = Callable[[tuple[Measurement, ...]], None]


def segment(trial: int, study: str, stop_step: int = 3, attempt: int = 0, folder: Path | None = None) -> Segment:
    layer = LayerSpec(mixer="softmax", heads=1, head_dim=8)
    architecture = Architecture(vocab_size=32, hidden_size=8, intermediate_size=8, layers=(layer,))
    recipe = Recipe(optimizer="adamw", lr=1e-3, warmup_steps=0, total_steps=9, batch_size=1, sequence_length=8)
    return Segment(
        study=study,
        trial=trial,
        attempt=attempt,
        rung=0,
        start_step=0,
        stop_step=stop_step,
        top=False,
        candidate=Candidate(architecture=architecture, recipe=recipe),
        seed=0,
        workload=Workload(),
        checkpoints=str(folder),
    )


def run(segment: Segment, report: Report, should_stop: Callable[[], bool]) -> Finished | Failed:
    """Reports a number a step, a study's number of seconds apart, or ends as the study says."""
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
        case "meet":
            meet(Path(segment.checkpoints), segment.trial)
            return finished(segment, segment.stop_step, {"pid": os.getpid()})
    step = segment.start_step
    while step < segment.stop_step and not should_stop():
        time.sleep(float(segment.study))
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


def meet(folder: Path, trial: int, seconds: float = 20) -> None:
    """Waits for the other of two segments, which must run at the same time."""
    (folder / str(trial)).touch()
    deadline = time.monotonic() + seconds
    while len(list(folder.iterdir())) < 2:
        if time.monotonic() > deadline:
            raise TimeoutError("the other segment did not run")
        time.sleep(0.02)


def describe() -> dict[str, float]:
    """What the process looks like from the thread that trains."""
    import signal

    import torch

    return {
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "omp": float(os.environ["OMP_NUM_THREADS"]),
        "denormal": float((torch.tensor([1.2e-38]) * 0.1).item()),
        "ignores_sigint": float(signal.getsignal(signal.SIGINT) is signal.SIG_IGN),
        "cuda_hidden": float(os.environ.get("CUDA_VISIBLE_DEVICES") == ""),
    }
