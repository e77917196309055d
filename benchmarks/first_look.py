"""A first look at what the proxy says: six cells of arXiv:2507.06457 (P1), trained to recall beyond their state.

    python benchmarks/first_look.py --shard 0/2 --minutes 8.5 [--out FOLDER]
    python benchmarks/first_look.py --shard 1/2 --minutes 8.5 --steps STEPS --done FOLDER...
    python benchmarks/first_look.py --device cpu --tiny

Cells: Gated DeltaNet and GLA, each pure, 12:1 and 3:1 (P1's placement: one full layer every N, last of its block), 12
layers, fla's defaults (GDN with a short convolution, GLA without), equal states, equal parameters to 1 %. Each cell is
trained at three learning rates side by side on the same batches; every run of the experiment takes the same number of
steps, which the first call plans from measured step times of all six cells and a later call is told (`--steps`). Cells
found complete under `--done` are not trained again.

What a layer can hold: heads x head_dim associations. A state of d_k x d_v keeps at most d_k values apart, one an
orthogonal key (Schlag et al., arXiv:2102.11174, section 4.1), and each head has one. The task is MQAR of a quarter of
that to four times that many pairs. The state is then .39 % of the elements a full layer keeps of the sequence, as P1's
1.3B GDN at 32k tokens (8 x 256 x 256 against 2 x 2048 x 32768).

Writes one JSON a cell, anew at every point of its learning curve, and summary.json; the table is printed last.
"""

# ruff: noqa: E402
from __future__ import annotations

import time

BEGAN = time.monotonic()  # the time limit includes importing torch and fla

import argparse
import json
import math
import os
import sys
import warnings
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from first_look_cells import CELLS, TINY, Settings, design
from first_look_report import report
from first_look_step import Run, kernel_errors, take_first_configs, trainer_loss

from nas.architecture import Architecture, derive_seed
from nas.cost import parameters
from nas.training.data.mix import Mix

CURVE = (1 / 32, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
"""Parts of the training after which recall is measured on the way."""
LOGITS_BOUND, GRADIENT_BOUND = 0.1, 0.3
"""The experiment is refused where GPU kernels in bf16 differ by more, relative, from our CPU kernels in float32."""


@dataclass
class Cell:
    """One design's runs, one a learning rate, and how long a step of them all takes."""

    name: str
    architecture: Architecture
    runs: list[Run]
    mix: Mix
    seconds_alone: float = 0.0
    """A step of one run."""
    seconds_together: float = 0.0
    """A step of all runs, side by side on streams of their own, or one after the other where that is faster."""
    side_by_side: bool = True
    curve: dict[float, list[dict[str, Any]]] = field(default_factory=dict)


def prepare(settings: Settings, backbone: str, ratio: str, lrs: tuple[float, ...], device: torch.device) -> Cell:
    """Builds a cell's runs, captures their steps, checks them against eager ones and times them."""
    began = time.monotonic()
    architecture = design(settings, backbone, ratio)
    mix = Mix(settings.workload(), settings.batch, settings.length, settings.seed, device)
    batches = [mix.batch(step) for step in range(3)]
    if any((batch.labels == -100).ne(batches[0].labels == -100).any() for batch in batches):
        raise ValueError(f"batch={settings.batch} must give every step the same labelled positions: a multiple of "
                         f"{len(settings.pairs)}")  # fmt: skip
    seed = derive_seed(settings.seed)
    runs = [Run(architecture, settings.recipe(lr, settings.warmup_steps * 8), batches[0], seed) for lr in lrs]
    cell = Cell(f"{backbone} {ratio}", architecture, runs, mix)
    theirs, ours = trainer_loss(runs[0], batches[0])
    if abs(theirs - ours) > 1e-3 * theirs:
        raise RuntimeError(f"{cell.name}: loss {ours} at fixed positions, {theirs} by nas.training.scoring.batch_loss")
    for run in runs:
        run.capture(batches)
    time_steps(cell)
    print(
        f"{cell.name:<20} {parameters(architecture):,} parameters (MLP {architecture.intermediate_size}), "
        f"modes {[run.mode for run in runs]}, step {1e3 * cell.seconds_alone:.2f} ms alone, "
        f"{1e3 * cell.seconds_together:.2f} ms for {len(runs)} ({'side by side' if cell.side_by_side else 'in turn'}), "
        f"prepared in {time.monotonic() - began:.1f} s",
        flush=True,
    )
    for run in runs:
        if run.check:
            print(f"  lr {run.recipe.lr:g}: captured against eager, relative: {run.check}", flush=True)
    return cell


def time_steps(cell: Cell, steps: int = 30) -> None:
    """Times one run alone and all together, and puts all on one stream if their own streams do not pay."""
    steps = steps if cell.runs[0].mode == "graph" else 2

    def seconds(runs: list[Run]) -> float:
        for count in (2, steps):  # the first two warm up
            synchronize(runs)
            began = time.perf_counter()
            for step in range(count):
                batch = cell.mix.batch(step)
                for run in runs:
                    run.advance(step, batch)
            synchronize(runs)
        return (time.perf_counter() - began) / steps

    cell.seconds_alone = seconds(cell.runs[:1])
    cell.seconds_together = seconds(cell.runs)
    if len(cell.runs) > 1 and cell.seconds_together > len(cell.runs) * cell.seconds_alone:
        cell.side_by_side = False
        for run in cell.runs:
            run.stream = cell.runs[0].stream
        cell.seconds_together = seconds(cell.runs)
    for run in cell.runs:
        run.reset()


def synchronize(runs: list[Run]) -> None:
    for run in runs:
        run.synchronize()


def measure(cell: Cell, settings: Settings, sequences: int, step: int) -> None:
    """Adds a point to the learning curve of each run that has not diverged."""
    task = cell.mix.workload.recall[0]
    held_out = {size: cell.mix.recall_evaluation(task, size, sequences) for size in settings.pairs}
    for run in cell.runs:
        if run.diverged_at is not None:
            continue
        loss, scores = run.loss.item(), run.scores(held_out, settings.evaluation_rows)
        if not all(map(math.isfinite, (loss, *(score.nll for score in scores.values())))):
            run.diverged_at = step
            print(f"!!! DIVERGED: {cell.name} lr {run.recipe.lr:g} by step {step}", flush=True)
            continue
        point = {
            "step": step,
            "sequences": sequences,
            "train_loss": loss,
            "recall": {str(size): score.accuracy for size, score in scores.items()},
            "nll": {str(size): score.nll for size, score in scores.items()},
        }
        cell.curve.setdefault(run.recipe.lr, []).append(point)


def train(
    cell: Cell, settings: Settings, steps: int, deadline: float, path: Path, about: dict[str, Any]
) -> dict[str, Any]:
    """Trains a cell's runs in lockstep; stops early, and says so, at the deadline. Its JSON is kept up to date."""
    began, points, done = time.monotonic(), {max(1, round(part * steps)) for part in CURVE}, 0
    for run in cell.runs:
        run.recipe = settings.recipe(run.recipe.lr, steps)
    while done < steps:
        batch = cell.mix.batch(done)
        for run in cell.runs:
            if run.diverged_at is None:
                run.advance(done, batch)
        done += 1
        if done % 50 == 0 or done in points:
            synchronize(cell.runs)
            if time.monotonic() > deadline and done < steps:
                print(f"!!! STOPPED EARLY: {cell.name} at step {done} of {steps}: the time is up", flush=True)
                break
        if done in points and done < steps:
            measure(cell, settings, settings.curve_sequences, done)
            write(path, outcome(cell, settings, steps, done, False, time.monotonic() - began) | about)
            print_point(cell, done, time.monotonic() - began)
    measure(cell, settings, settings.final_sequences, done)
    result = outcome(cell, settings, steps, done, done == steps, time.monotonic() - began) | about
    write(path, result)
    print_point(cell, done, time.monotonic() - began)
    return result


def print_point(cell: Cell, step: int, seconds: float) -> None:
    for lr, points in cell.curve.items():
        recall = "/".join(f"{value:.2f}" for value in points[-1]["recall"].values())
        loss = points[-1]["train_loss"]
        print(
            f"  {cell.name:<20} step {step:>5} lr {lr:<7g} loss {loss:.3f} recall {recall} {seconds:.0f} s", flush=True
        )


def outcome(cell: Cell, settings: Settings, planned: int, done: int, complete: bool, seconds: float) -> dict[str, Any]:
    """A cell's JSON: its design, how it was run, and the learning curve of each learning rate, the last point final."""
    linear = next(layer for layer in cell.architecture.layers if not layer.is_softmax)
    backbone, ratio = cell.name.split()
    return {
        "cell": cell.name,
        "backbone": backbone,
        "ratio": ratio,
        "complete": complete,
        "planned_steps": planned,
        "steps": done,
        "tokens": done * settings.batch * settings.length,
        "seconds": seconds,
        "parameters": parameters(cell.architecture),
        "intermediate_size": cell.architecture.intermediate_size,
        "full_attention_layers": list(cell.architecture.full_attention_layers),
        "conv_size": linear.conv_size,
        "state_elements_a_layer": settings.heads * settings.head_dim**2,
        "capacity_a_layer": settings.capacity,
        "chance": 1 / settings.values,
        "settings": asdict(settings),
        "seconds_a_step_alone": cell.seconds_alone,
        "seconds_a_step_together": cell.seconds_together,
        "side_by_side": cell.side_by_side,
        "runs": [
            {
                "lr": run.recipe.lr,
                "mode": run.mode,
                "fallback": run.fallback,
                "captured_against_eager": asdict(run.check) if run.check else None,
                "diverged_at": run.diverged_at,
                "curve": cell.curve.get(run.recipe.lr, []),
            }
            for run in cell.runs
        ],
    }


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def plan(cells: dict[tuple[str, str], Cell], settings: Settings, shards: int, seconds: float, scoring: float) -> int:
    """Steps a run such that each of `shards` calls ends within `seconds` of training and scoring.

    `scoring` is the time of one sequence of every size. A cell of another call was timed with one run: its runs
    together are taken to gain what those of this call's cells gain.
    """
    own = [cell for cell in cells.values() if len(cell.runs) == len(settings.lrs)]
    gain = max(cell.seconds_together / cell.seconds_alone for cell in own)
    together = {key: max(cell.seconds_together, gain * cell.seconds_alone) for key, cell in cells.items()}
    sequences = len(CURVE) * settings.curve_sequences + settings.final_sequences
    counts = []
    for shard in range(shards):
        members = CELLS[shard::shards]
        left = 0.93 * seconds - scoring * sequences * len(settings.lrs) * len(members)
        counts.append(left / sum(together[key] for key in members))
    return max(0, int(min(counts)) // 100 * 100)


def check_kernels(settings: Settings) -> dict[str, dict[str, float]]:
    """Compares the GPU kernels as configured here with our CPU kernels; ends the program where they are wrong."""
    mix = Mix(settings.workload(), len(settings.pairs), settings.length, settings.seed)
    batch, errors = mix.batch(0), {}
    for backbone in dict.fromkeys(backbone for backbone, _ in CELLS):
        logits, gradient = kernel_errors(
            design(settings, backbone, "3:1"), batch.input_ids, batch.labels, settings.seed
        )
        errors[backbone] = {"logits": logits, "gradient": gradient}
        print(f"{backbone:<20} GPU kernels against CPU: logits {logits:.1e}, gradient {gradient:.1e}", flush=True)
        if not (logits < LOGITS_BOUND and gradient < GRADIENT_BOUND):
            raise SystemExit(f"!!! {backbone}: GPU kernels are wrong; bounds {LOGITS_BOUND} and {GRADIENT_BOUND}")
    return errors


def completed(folders: list[Path]) -> dict[str, dict[str, Any]]:
    """Results of complete cells in `folders`, by cell."""
    found = [json.loads(path.read_text()) for folder in folders for path in sorted(folder.glob("cell-*.json"))]
    return {result["cell"]: result for result in found if result["complete"]}


def main() -> int:
    args = arguments()
    settings = args.settings
    device = torch.device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_flush_denormal(True)
    warnings.filterwarnings("ignore", message="This instance was constructed with capturable=True")
    about: dict[str, Any] = {"torch": torch.__version__, "device": args.device, "first_configs": device.type == "cuda"}
    errors = {}
    if device.type == "cuda":
        import fla
        import triton

        take_first_configs()
        about |= {"device": torch.cuda.get_device_name(), "triton": triton.__version__, "fla": fla.__version__}
        print("Triton kernels: the first configuration of each, not tuned (fla's tuning costs minutes a shape)")
    print(f"{about}, {time.monotonic() - BEGAN:.0f} s so far", flush=True)
    if device.type == "cuda":
        errors = check_kernels(settings)

    results = completed(args.done)
    wanted = [key for key in CELLS[args.shard[0] :: args.shard[1]] if " ".join(key) not in results]
    others = [key for key in CELLS if key not in wanted and not args.steps]
    cells = {key: prepare(settings, *key, settings.lrs, device) for key in wanted}
    cells |= {key: prepare(settings, *key, settings.lrs[:1], device) for key in others}
    deadline = BEGAN + 60 * args.minutes - 8  # for the last scores, the table and the exit
    if not wanted:
        return finish(args, settings, results, about, errors, [])

    first = cells[wanted[0]]
    for _ in range(2):  # the first compiles the kernels' inference variants
        began = time.perf_counter()
        measure(first, settings, settings.curve_sequences, 0)
        scoring = (time.perf_counter() - began) / settings.curve_sequences / len(first.runs)
    first.curve.clear()
    planned = plan(cells, settings, args.shard[1], deadline - time.monotonic(), scoring) if not args.steps else 0
    steps = args.steps or min(args.max_steps, planned)
    print(
        f"plan: {steps} steps a run (time for {planned or 'as told'}); a later call takes --steps {steps}", flush=True
    )
    if steps < 100:
        raise SystemExit(f"!!! minutes={args.minutes:g} leave {steps} steps a run; at least 100 are needed")
    left = []
    for key in wanted:
        cell = cells[key]
        need = 0.9 * steps * cell.seconds_together
        if time.monotonic() + need > deadline:
            print(
                f"!!! NOT STARTED: {cell.name} needs {need:.0f} s, {deadline - time.monotonic():.0f} s are left",
                flush=True,
            )
            left.append(cell.name)
            continue
        path = args.out / f"cell-{key[0]}-{key[1].replace(':', 'to')}.json"
        results[cell.name] = train(cell, settings, steps, deadline, path, about | {"kernel_errors": errors})
    return finish(args, settings, results, about, errors, left)


def finish(
    args: argparse.Namespace,
    settings: Settings,
    results: dict[str, dict[str, Any]],
    about: dict[str, Any],
    errors: dict[str, dict[str, float]],
    left: list[str],
) -> int:
    """Writes the summary and prints the table of all cells known here."""
    table, summary = report(list(results.values()))
    seconds = time.monotonic() - BEGAN
    write(
        args.out / "summary.json", about | {"kernel_errors": errors, "not_started": left, "seconds": seconds} | summary
    )
    print(f"{table}\n{seconds:.0f} s of {60 * args.minutes:.0f}")
    return 1 if left else 0


def shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and int(part) < int(parts) <= len(CELLS)):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: I/N with I from 0 to N - 1, N at most {len(CELLS)}")
    return int(part), int(parts)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shard", type=shard, default=(0, 1), metavar="I/N", help="part I of N of the cells; all by default"
    )
    parser.add_argument("--minutes", type=float, default=8.5, help="when all must have ended, imports included")
    parser.add_argument("--steps", type=int, help="steps a run; planned from the time by default")
    parser.add_argument("--max-steps", type=int, default=6000, help="at most so many when planned")
    parser.add_argument("--done", type=Path, nargs="*", default=[], help="folders with cells of earlier calls")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out/first_look")))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a dry run of the machinery, no experiment")
    parser.add_argument("--lrs", type=float, nargs="+", help="learning rates")
    parser.add_argument("--pairs", type=int, nargs="+", help="numbers of pairs, trained on and scored")
    for name in ("heads", "head_dim", "length", "batch", "keys", "values", "gla_conv", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    args = parser.parse_args()
    given = {name: getattr(args, name) for name in vars(Settings()) if getattr(args, name, None) is not None}
    given |= {name: tuple(given[name]) for name in ("lrs", "pairs") if name in given}
    args.settings = replace(TINY if args.tiny else Settings(), **given)
    return args


if __name__ == "__main__":
    sys.exit(main())
