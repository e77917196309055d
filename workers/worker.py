"""The worker: one process per slot that trains segments, one after the other, and streams what it measures.

A Worker is a plain class; workers.pool makes a Ray actor of it. Training runs in one thread of its own that lives as
long as the process, so that kernels, data and the CUDA context stay warm from trial to trial; the actor's other
threads answer `take` and `stop` meanwhile.
"""

from __future__ import annotations

import importlib
import os
import queue
import signal
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from nas.messages import Event, Failed, Failure, Finished, Measurement, Report, Segment

Runner = Callable[[Segment, Callable[[tuple[Measurement, ...]], None], Callable[[], bool]], Finished | Failed]
"""run(segment, report, should_stop): trains a segment, at best to its stop_step, and says how it ended."""

DEFAULT_RUNNER = "nas.training.trainer:run_segment"


def load_runner(path: str) -> Runner:
    """The function at a dotted path, "package.module:function".

    Raises:
        ImportError, AttributeError: there is none.
    """
    module, _, function = path.partition(":")
    runner: Runner = getattr(importlib.import_module(module), function)
    return runner


class Worker:
    """Trains one segment at a time. `start` and `take` return events as they come, the last of a segment being
    Finished or Failed; every call is made from another thread than the one that trains.

    Args:
        runner: dotted path of the Runner, imported in the worker when its first segment starts.
        threads: CPU threads of torch, OpenMP and MKL in this process.
        cuda: whether the process may see the GPUs that Ray gave it; without it every device is hidden.
    """

    def __init__(self, runner: str, threads: int, cuda: bool) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the driver stops us
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)  # read when torch is imported
        if not cuda:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._runner = runner
        self._threads = threads
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._stopped: set[tuple[int, int]] = set()
        self._trainer = ThreadPoolExecutor(1, "trainer")

    def pid(self) -> int:
        """The process id: an answer means that the worker is up."""
        return os.getpid()

    def start(self, segment: Segment) -> list[Event]:
        """Starts a segment and waits for its first events."""
        self._trainer.submit(self._train, segment)
        return self.take()

    def take(self) -> list[Event]:
        """Waits for an event, and returns it with all others that are ready, in order."""
        events = [self._events.get()]
        while not self._events.empty():
            events.append(self._events.get())
        return events

    def stop(self, trial: int, attempt: int) -> None:
        """Asks a segment, running or about to, to write its checkpoint and return early."""
        self._stopped.add((trial, attempt))

    def _train(self, segment: Segment) -> None:
        key = (segment.trial, segment.attempt)
        began = time.monotonic()

        def report(measurements: tuple[Measurement, ...]) -> None:
            self._events.put(Report(trial=segment.trial, attempt=segment.attempt, measurements=measurements))

        try:
            prepare_thread(self._threads)
            end = load_runner(self._runner)(segment, report, lambda: key in self._stopped)
            if not isinstance(end, Finished | Failed):
                raise TypeError(f"{self._runner} returned {type(end).__name__}, not Finished or Failed")
        except BaseException as error:  # noqa: BLE001  whatever ends the segment, SystemExit too, must reach the dispatcher
            end = failed(segment, error, time.monotonic() - began)
        self._stopped.discard(key)
        self._events.put(end)


def prepare_thread(threads: int) -> None:
    """Sets what torch keeps per thread: OpenMP's thread count, and flushing denormals (a CPU step is 30x slower on
    them); threads that OpenMP starts from here inherit the latter."""
    import torch

    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)


def failed(segment: Segment, error: BaseException, seconds: float) -> Failed:
    """The Failed event of an exception; out of memory, on the GPU or the host, is OOM and everything else ERROR."""
    names = {base.__name__ for base in type(error).__mro__}
    lines = str(error).strip().splitlines()
    return Failed(
        trial=segment.trial,
        attempt=segment.attempt,
        kind=Failure.OOM if names & {"OutOfMemoryError", "MemoryError"} else Failure.ERROR,
        message=": ".join([type(error).__name__, *lines[:1]]),
        traceback="".join(traceback.format_exception(error)),
        step=segment.start_step,
        seconds=seconds,
    )
