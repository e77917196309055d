"""Runs one segment: a trial from its last checkpoint to the next rung. What a worker calls."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from nas.cost import parameters
from nas.messages import Failed, Failure, Finished, Measurement, Segment
from nas.models.configuration import HybridConfig
from nas.models.mixers import has_lower_bounds, is_delta_rule, is_linear
from nas.models.modeling import HybridForCausalLM
from nas.registry import Dims, get_mixer
from nas.training import checkpoints
from nas.training.averaging import Average, decay
from nas.training.checkpoints import Checkpoint, CheckpointError, CheckpointWriteError
from nas.training.data.mix import Mix
from nas.training.optimizers import HybridOptimizer
from nas.training.schedule import multiplier
from nas.training.scoring import batch_loss, recall_scores, text_scores

Reporter = Callable[[tuple[Measurement, ...]], None]
CURVE_POINTS = 6
"""Quick looks at recall over a full run, each on a quarter of the evaluation's sequences."""
DIVERGED_LOSS = 10.0
"""A training loss of so many times a uniform guess's, ln(vocabulary), counts as diverged though finite."""


class DivergedError(ArithmeticError):
    """The loss, a gradient or a score is no longer a finite, sensible number."""


def run_segment(
    segment: Segment, report: Reporter, should_stop: Callable[[], bool] = lambda: False
) -> Finished | Failed:
    """Trains from `segment.checkpoint` (or from scratch) to `segment.stop_step`, scores the rung, saves a checkpoint.

    Idempotent: the same segment gives the same checkpoint, on a CPU bit by bit. Runs on as many threads as torch is
    set to. Measurements on the way go to `report`: `train_loss`, and a curve of `recall` on fewer sequences.

    Args:
        should_stop: asked before every step. Once true, the segment ends with a checkpoint and returns Finished with
            `step` below `stop_step` and without scores: the trial is paused there.

    Returns:
        Finished, or Failed with `diverged`, `oom`, `checkpoint`, `storage` or `error`; only KeyboardInterrupt and
        SystemExit are raised.
    """
    began = time.monotonic()
    run: _Run | None = None

    def failed(kind: Failure, error: BaseException) -> Failed:
        step = run.step if run else segment.start_step
        message = " ".join(f"{type(error).__name__}: {error}".split())
        trace = "" if kind is Failure.DIVERGED else traceback.format_exc()
        return Failed(
            trial=segment.trial,
            attempt=segment.attempt,
            kind=kind,
            message=message,
            traceback=trace,
            step=step,
            seconds=time.monotonic() - began,
        )

    try:
        run = _Run(segment, report)
        run.train(should_stop)
        scores = run.scores() if run.step == segment.stop_step else ()
        return Finished(
            trial=segment.trial,
            attempt=segment.attempt,
            step=run.step,
            checkpoint=run.save(),
            seconds=time.monotonic() - began,
            measurements=scores,
        )
    except DivergedError as error:
        return failed(Failure.DIVERGED, error)
    except (torch.OutOfMemoryError, MemoryError) as error:
        return failed(Failure.OOM, error)
    except CheckpointError as error:
        return failed(Failure.CHECKPOINT, error)
    except CheckpointWriteError as error:
        return failed(Failure.STORAGE, error)
    except Exception as error:  # noqa: BLE001  the worker's boundary: a trial's fault must not end the worker
        return failed(Failure.ERROR, error)


def pick_device(wanted: str) -> torch.device:
    """cuda where asked for or, for "auto", where there is one."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def check_halves(name: str) -> None:
    """That the two halves of a mixer, which another package may have written, say the same about it.

    Raises:
        ValueError: its entry in the registry and its `register` call differ in a flag.
    """
    entry = get_mixer(name)
    bounded = entry.lower_bounds(Dims(d=2, heads=1, head=2, value_heads=1, value_head=2, kv_heads=1, conv=0)) > 0
    linear = entry.family == "linear" and entry.routable
    flags = {
        "delta_rule": (entry.delta_rule, is_delta_rule(name)),
        "lower_bounds": (bounded, has_lower_bounds(name)),
        "linear": (linear, is_linear(name)),
    }
    for flag, (wanted, registered) in flags.items():
        if wanted != registered:
            raise ValueError(
                f"mixer {name!r}: register(..., {flag}={registered}) contradicts its entry in nas.mixers; "
                f"allowed: {flag}={wanted}"
            )


class _Run:
    """The state of a running segment."""

    def __init__(self, segment: Segment, report: Reporter) -> None:
        torch.set_flush_denormal(True)  # decays underflow, and denormals make a CPU step 30x slower
        self.segment, self.report = segment, report
        self.recipe, self.workload = segment.candidate.recipe, segment.workload
        self.device = pick_device(segment.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with suppress(OSError):  # some sandboxes forbid it: then earlier segments of the process count too
                Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM, proc(5)
        torch.manual_seed(segment.seed)
        for name in {layer.mixer for layer in segment.candidate.architecture.layers}:
            check_halves(name)
        config = HybridConfig(architecture=segment.candidate.architecture.canonical())
        model: nn.Module = HybridForCausalLM(config)
        counted, priced = sum(p.numel() for p in model.parameters()), parameters(segment.candidate.architecture)
        if counted != priced:  # ours are tested; a package's own formula may be wrong
            raise ValueError(
                f"the model has {counted} parameters, by the formulas of its mixers {priced}; mend nas.mixers"
            )
        self.model = model.to(self.device).train()
        self.average = Average(self.model)
        self.optimizer = HybridOptimizer(self.model, self.recipe, head=self.model.get_submodule("lm_head"))
        self.mix = Mix(self.workload, self.recipe.batch_size, self.recipe.sequence_length, segment.seed, self.device)
        self.step = 0
        if segment.checkpoint:
            self._restore(segment.checkpoint)
        if self.step != segment.start_step:
            raise ValueError(f"start_step={segment.start_step} but checkpoint={segment.checkpoint} is of {self.step}")
        self._losses: list[float] = []
        self._training_seconds = 0.0

    def _restore(self, path: str) -> None:
        state = checkpoints.load(path, self.device)
        self.model.load_state_dict(state.model)
        self.average.model.load_state_dict(state.average)
        self.optimizer.load_state_dict(state.optimizer)
        self.step = state.step

    def save(self) -> str:
        state = Checkpoint(
            self.step, self.model.state_dict(), self.average.model.state_dict(), self.optimizer.state_dict()
        )
        return checkpoints.save(state, self.segment.checkpoints, protect=self.segment.checkpoint)

    def train(self, should_stop: Callable[[], bool]) -> None:
        every = max(1, self.recipe.total_steps // CURVE_POINTS)
        while self.step < self.segment.stop_step and not should_stop():
            began = time.perf_counter()
            try:
                self._losses.append(self._update())
            except DivergedError:
                self._report_losses()
                raise
            self.step += 1
            self._training_seconds += time.perf_counter() - began
            if self.step % self.workload.report_every == 0 or self.step == self.segment.stop_step:
                self._report_losses()
            if self.step % every == 0 and self.step < self.segment.stop_step:
                quick = max(1, self.workload.evaluation_sequences // 4)
                self.report(self._measure(self._evaluate(quick, text=False)))
        self._report_losses()

    def _update(self) -> float:
        """One optimiser step; the loss before it, in nats."""
        batch = self.mix.batch(self.step)
        with self._autocast():
            loss = batch_loss(self.model, batch)
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.grad_clip)
        value = loss.item()
        limit = DIVERGED_LOSS * math.log(self.segment.candidate.architecture.vocab_size)
        if not (math.isfinite(value) and math.isfinite(norm.item()) and value < limit):
            raise DivergedError(f"at step {self.step} the loss is {value:.4g} and the gradient norm {norm.item():.4g}")
        self.optimizer.set_lr(multiplier(self.step, self.recipe))
        self.optimizer.step()
        self.average.update(decay(self.step, self.recipe.total_steps))
        return value

    def scores(self) -> tuple[Measurement, ...]:
        """The rung's scores: of the raw weights at the top rung, of their moving average below it."""
        values = self._evaluate(self.workload.evaluation_sequences, text=True)
        trained = (self.step - self.segment.start_step) * self.recipe.tokens_per_step
        if trained:
            values["tokens_per_second"] = trained / self._training_seconds
        values["peak_memory_bytes"] = float(self._peak_memory())
        return self._measure(values)

    def _evaluate(self, sequences: int, text: bool) -> dict[str, float]:
        model = (self.model if self.segment.top else self.average.model).eval()
        rows = self.recipe.batch_size
        with self._autocast():
            values = recall_scores(model, self.mix, sequences, rows)
            if text:
                values |= text_scores(model, self.mix, sequences, rows)
        self.model.train()
        return values

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def _peak_memory(self) -> int:
        """Bytes: the peak of this segment, allocated on the device on CUDA, else resident in the process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    def _report_losses(self) -> None:
        """Reports the mean training loss since the last report."""
        if self._losses:
            mean = sum(self._losses) / len(self._losses)
            self._losses = []
            self.report(self._measure({"train_loss": mean}))

    def _measure(self, values: Mapping[str, float]) -> tuple[Measurement, ...]:
        for name, value in values.items():
            if not math.isfinite(value):
                raise DivergedError(f"at step {self.step} {name} is {value}")
        return tuple(Measurement(step=self.step, name=name, value=value) for name, value in values.items())
