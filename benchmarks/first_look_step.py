"""One training run of the first look, its whole step captured as a CUDA graph on a GPU and eager on a CPU.

The step is that of `nas.training.trainer`: bf16 autocast on a GPU, the loss at labelled positions only, gradient
clipping, HybridOptimizer, the schedule of the Recipe. A capture is trusted only once it has given the losses and
weights of eager steps from the same state; where it fails, the run goes on eagerly, and the output and the results say
so.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from nas.architecture import Architecture, Recipe
from nas.models.configuration import HybridConfig
from nas.models.modeling import HybridForCausalLM
from nas.training.data.mix import Batch
from nas.training.data.recall.mqar import IGNORED
from nas.training.optimizers import HybridOptimizer
from nas.training.schedule import multiplier
from nas.training.scoring import Score, batch_loss, score

WARMUP_STEPS = 3
"""Eager steps before a capture: they compile the kernels and make the optimiser's state."""
LOSS_BOUND, UPDATE_BOUND = 1e-3, 5e-2
"""What a captured step may differ by from an eager one, relative; the update also by three times the noise."""


@dataclass(frozen=True)
class Check:
    """Captured against eager steps from the same state, on the same batches. All figures are relative.

    loss: the largest difference of a loss. weights: the largest difference of a weight, over the largest weight.
    update: norm of the difference of all weights over the norm of their change. noise: the same of two eager runs.
    """

    steps: int
    loss: float
    weights: float
    update: float
    noise: float

    @property
    def passed(self) -> bool:
        return self.loss <= LOSS_BOUND and self.update <= max(UPDATE_BOUND, 3 * self.noise)


def autocast(device: torch.device) -> torch.autocast:
    """bf16 on a GPU, nothing on a CPU: as the trainer does."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


class Run:
    """A model and its optimiser at one learning rate; `mode` is "graph" or "eager", `fallback` says why eager."""

    def __init__(self, architecture: Architecture, recipe: Recipe, first: Batch, seed: int) -> None:
        self.device = first.input_ids.device
        self.recipe = recipe
        torch.manual_seed(seed)
        model: Any = HybridForCausalLM(HybridConfig(architecture=architecture.canonical()))
        self.model = model.to(self.device).train()
        self.parameters: list[nn.Parameter] = list(self.model.parameters())
        self.optimizer = HybridOptimizer(self.model, recipe, head=self.model.lm_head)
        self._lr: Tensor | None = None
        self.stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream()
            self._make_capturable()
        self._initial = [p.detach().clone() for p in self.parameters]
        # static inputs: a graph reads these addresses at every replay
        self.positions = (first.labels != IGNORED).flatten().nonzero().squeeze(1)
        self._input_ids = first.input_ids.clone()
        self._labels = first.labels.flatten()[self.positions]
        self.loss = torch.zeros((), device=self.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self.mode = "eager"
        self.fallback: str | None = None if self.stream else "no CUDA device"
        self.check: Check | None = None
        self.diverged_at: int | None = None

    def _make_capturable(self) -> None:
        """The learning rate as a tensor that a graph reads, the step counters on the device."""
        self._lr = torch.zeros((), device=self.device)
        for group in self.optimizer.groups["adamw"]:
            group["capturable"], group["lr"] = True, self._lr

    def _update(self) -> None:
        """One optimiser step on the static inputs; every operation of it can be captured."""
        self.optimizer.zero_grad()
        with autocast(self.device):
            hidden = self.model.model(self._input_ids, use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden.flatten(0, 1).index_select(0, self.positions))
        loss = cross_entropy(logits.float(), self._labels)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, self.recipe.grad_clip)
        self.optimizer.step()
        self.loss.copy_(loss.detach())

    def advance(self, step: int, batch: Batch, eager: bool = False) -> None:
        """Update number `step`, from 0; asynchronous on a GPU, on this run's stream."""
        with self.on_stream():
            self._input_ids.copy_(batch.input_ids)
            self._labels.copy_(batch.labels.flatten().index_select(0, self.positions))
            if self.stream is not None:  # the batch was made on another stream, which may free it meanwhile
                batch.input_ids.record_stream(self.stream)
                batch.labels.record_stream(self.stream)
            scale = multiplier(step, self.recipe)
            if self._lr is not None:
                self._lr.fill_(self.recipe.lr * scale)
            else:
                self.optimizer.set_lr(scale)
            if self._graph is None or eager:
                self._update()
            else:
                self._graph.replay()

    def on_stream(self) -> AbstractContextManager[Any]:
        """This run's stream, after all that the current one was given so far."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)

    def capture(self, batches: Sequence[Batch]) -> None:
        """Captures the step and checks it on `batches`; falls back to eager steps, loudly, where either fails."""
        if self.stream is None:
            return
        try:
            with self.on_stream():
                for _ in range(WARMUP_STEPS):
                    self._update()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                self._update()
            self._graph = graph
            self.check = self.compare(batches)
            if not self.check.passed:
                raise RuntimeError(f"captured and eager steps differ: {asdict(self.check)}")
            self.mode = "graph"
        except RuntimeError as error:  # CUDA errors are RuntimeErrors too
            self._graph = None
            self.fallback = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            print(f"!!! EAGER FALLBACK at lr {self.recipe.lr:g}, several times slower: {self.fallback}", flush=True)
        self.reset()

    def compare(self, batches: Sequence[Batch]) -> Check:
        """Plays `batches` from the initial state: captured, eagerly, and eagerly again."""
        outcomes = []
        for eager in (False, True, True):
            self.reset()
            values = []
            for step, batch in enumerate(batches):
                self.advance(step, batch, eager)
                self.synchronize()
                values.append(self.loss.item())
            outcomes.append((torch.tensor(values), self._flat(self.parameters)))
        (losses, weights), (expected_losses, expected), (_, again) = outcomes
        change = (expected - self._flat(self._initial)).norm()
        return Check(
            steps=len(batches),
            loss=((losses - expected_losses) / expected_losses).abs().max().item(),
            weights=((weights - expected).abs().max() / expected.abs().max()).item(),
            update=((weights - expected).norm() / change).item(),
            noise=((again - expected).norm() / change).item(),
        )

    @staticmethod
    def _flat(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([t.detach().flatten().double() for t in tensors])

    @torch.no_grad()
    def reset(self) -> None:
        """Initial weights and an empty optimiser, in place: a graph keeps its addresses."""
        self.synchronize()
        for parameter, value in zip(self.parameters, self._initial, strict=True):
            parameter.copy_(value)
        for state in self.optimizer.state_dict()["adamw"]["state"].values():
            for value in state.values():
                value.zero_()
        self.synchronize()

    def synchronize(self) -> None:
        if self.stream is not None:
            torch.cuda.synchronize()

    def scores(self, evaluation: dict[int, tuple[Tensor, Tensor]], rows: int) -> dict[int, Score]:
        """Recall by number of pairs, by the project's own scoring."""
        self.synchronize()
        self.model.eval()
        with autocast(self.device):
            found = {size: score(self.model, *held_out, rows) for size, held_out in evaluation.items()}
        self.model.train()
        self.synchronize()
        return found


def trainer_loss(run: Run, batch: Batch) -> tuple[float, float]:
    """The loss of `nas.training.scoring.batch_loss` on `batch` and ours, from the run's present weights."""
    with torch.no_grad(), autocast(run.device):
        theirs = batch_loss(run.model, batch).item()
        hidden = run.model.model(batch.input_ids, use_cache=False).last_hidden_state
        logits = run.model.lm_head(hidden.flatten(0, 1).index_select(0, run.positions))
        ours = cross_entropy(logits.float(), batch.labels.flatten()[run.positions]).item()
    return theirs, ours


def kernel_errors(architecture: Architecture, input_ids: Tensor, labels: Tensor, seed: int) -> tuple[float, float]:
    """Relative errors of logits and gradient on the GPU (bf16 autocast) against our CPU kernels (float32).

    input_ids and labels, int64 [B, T], on the CPU; labels are -100 where there is none.
    """
    torch.manual_seed(seed)
    model: Any = HybridForCausalLM(HybridConfig(architecture=architecture.canonical())).train()
    outcomes = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        model = model.to(device)
        model.zero_grad(set_to_none=True)
        with autocast(device):
            logits = model(input_ids.to(device), use_cache=False).logits
        logits = logits.float()
        cross_entropy(logits.flatten(0, 1), labels.to(device).flatten(), ignore_index=IGNORED).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        outcomes.append((logits.detach().double().cpu(), gradient.double().cpu()))
    (expected, expected_gradient), (found, found_gradient) = outcomes
    return (
        ((found - expected).norm() / expected.norm()).item(),
        ((found_gradient - expected_gradient).norm() / expected_gradient.norm()).item(),
    )


def take_first_configs() -> None:
    """Every autotuned Triton kernel takes its first configuration, untimed: fla's tuning costs minutes a shape."""
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs

    def first(self: Any, kwargs: Any, *rest: Any) -> Any:
        return prune(self, kwargs, *rest)[:1]

    def untimed(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        return [0.0, 0.0, 0.0]

    Autotuner.prune_configs = first
    Autotuner._bench = untimed
