"""The first look's scores beside P1's: `python benchmarks/first_look_report.py FOLDER...` (folders with cell-*.json).

Prints Markdown: each cell at its best learning rate, recall by number of pairs, how early it was learnt, P1's RULER
average beside it, and rank correlations over the cells. With six cells a correlation says little: P1 ran one seed a
cell, and two of the six differ by .004.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

RULER = {
    "gated_deltanet pure": 0.356,
    "gated_deltanet 12:1": 0.352,
    "gated_deltanet 3:1": 0.436,
    "gla pure": 0.144,
    "gla 12:1": 0.288,
    "gla 3:1": 0.332,
}
"""RULER averages of the 1.3B models, arXiv:2507.06457, table 7."""
LEARNT = 0.5
"""The step at which a run has learnt is the first measured one with a mean recall of at least so much."""
BINDING = 1.2
"""A cell learnt to bind values to keys where its mean recall is at least so many times that of `guess`."""
Result = dict[str, Any]


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1, ties at their mean."""
    return [sum(y < x for y in values) + (sum(y == x for y in values) + 1) / 2 for x in values]


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Pearson's correlation of the ranks; None where one side is constant."""
    a, b = ranks(xs), ranks(ys)
    ma, mb = mean(a), mean(b)
    spread = math.sqrt(sum((x - ma) ** 2 for x in a) * sum((y - mb) ** 2 for y in b))
    return sum((x - ma) * (y - mb) for x, y in zip(a, b, strict=True)) / spread if spread else None


def kendall(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Kendall's tau-b, which counts ties; None where one side is constant."""

    def sign(x: float) -> int:
        return (x > 0) - (x < 0)

    pairs = [(sign(xs[i] - xs[j]), sign(ys[i] - ys[j])) for i, j in combinations(range(len(xs)), 2)]
    spread = math.sqrt(sum(a != 0 for a, _ in pairs) * sum(b != 0 for _, b in pairs))
    return sum(a * b for a, b in pairs) / spread if spread else None


def recall(point: Result) -> float:
    """Mean recall over the numbers of pairs, equal weights."""
    return float(mean(point["recall"].values()))


def nll(point: Result) -> float:
    return float(mean(point["nll"].values()))


def guess(pairs: int, values: int, draws: int = 4000) -> float:
    """Recall of a model that binds no value to a key and always answers the value shown most often, by simulation."""
    source = random.Random(0)
    return mean(max(Counter(source.choices(range(values), k=pairs)).values()) / pairs for _ in range(draws))


def best_run(result: Result) -> Result | None:
    """The run of the highest final recall, then the lowest nll; None where all diverged."""
    kept = [run for run in result["runs"] if run["diverged_at"] is None and run["curve"]]
    return max(kept, key=lambda run: (recall(run["curve"][-1]), -nll(run["curve"][-1])), default=None)


def learnt_at(run: Result) -> int | None:
    return next((point["step"] for point in run["curve"] if recall(point) >= LEARNT), None)


def speed(run: Result) -> float:
    """Mean over the measured points of the mean recall: high where it was learnt early."""
    return mean(recall(point) for point in run["curve"])


def correlations(results: Sequence[Result]) -> dict[str, dict[str, float | None]]:
    """Spearman and Kendall of the cells' scores with P1's RULER averages, at each cell's best learning rate."""
    kept = [(RULER[result["cell"]], run) for result in results if (run := best_run(result))]
    if len(kept) < 3:
        return {}
    published = [ruler for ruler, _ in kept]
    scores = {
        "mean recall": [recall(run["curve"][-1]) for _, run in kept],
        "-nll": [-nll(run["curve"][-1]) for _, run in kept],
        "mean recall over training": [speed(run) for _, run in kept],
    }
    for pairs in kept[0][1]["curve"][-1]["recall"]:
        scores[f"recall, {pairs} pairs"] = [run["curve"][-1]["recall"][pairs] for _, run in kept]
    return {
        name: {"spearman": spearman(values, published), "kendall": kendall(values, published), "cells": len(kept)}
        for name, values in scores.items()
    }


def report(results: Sequence[Result]) -> tuple[str, Result]:
    """The Markdown tables, and the same as a JSON-ready summary."""
    results = sorted(results, key=lambda result: list(RULER).index(result["cell"]))
    if not results:
        return "no cell was run", {"cells": [], "correlations": {}}
    capacity, sizes = results[0]["capacity_a_layer"], list(results[0]["settings"]["pairs"])
    shares = "/".join(f"{size / capacity:g}" for size in sizes)
    header = (
        f"A layer holds {capacity} associations; pairs {'/'.join(map(str, sizes))} = {shares} of it; "
        f"chance {results[0]['chance']:.3f}; {', '.join(sorted({str(r['steps']) for r in results}))} steps."
    )
    names = ("cell", "RULER, P1", "best lr", *map(str, sizes), "mean", "nll", f"{LEARNT:g} at step", "mean by lr")
    lines = [
        header,
        "",
        f"| {' | '.join(names)} |",
        "|" + "---|" * (len(sizes) + 7),
    ]
    guesses = [guess(size, results[0]["settings"]["values"]) for size in sizes]
    shown = " | ".join(f"{x:.2f}" for x in guesses)
    lines.append(f"| no binding: the value shown most | - | - | {shown} | {mean(guesses):.3f} | - | - | - |")
    cells, unlearnt = [], []
    for result in results:
        run = best_run(result)
        by_lr = {f"{r['lr']:g}": recall(r["curve"][-1]) if r["curve"] else None for r in result["runs"]}
        listed = ", ".join(f"{lr}: {'diverged' if x is None else f'{x:.2f}'}" for lr, x in by_lr.items())
        cells.append({"cell": result["cell"], "ruler": RULER[result["cell"]], "recall_by_lr": by_lr})
        if run is None:
            lines.append(
                f"| {result['cell']} | {RULER[result['cell']]:.3f} | all diverged |"
                + " |" * (len(sizes) + 3)
                + f" {listed} |"
            )
            continue
        final = run["curve"][-1]
        if recall(final) < BINDING * mean(guesses):
            unlearnt.append(result["cell"])
        cells[-1] |= {"lr": run["lr"], "recall": recall(final), "nll": nll(final), "learnt_at": learnt_at(run)}
        found = " | ".join(f"{value:.2f}" for value in final["recall"].values())
        lines.append(
            f"| {result['cell']} | {RULER[result['cell']]:.3f} | {run['lr']:g} | {found} | {recall(final):.3f} | "
            f"{nll(final):.3f} | {learnt_at(run) or '-'} | {listed} |"
        )
    found_correlations = correlations(results)
    if found_correlations:
        lines += ["", "| rank correlation with RULER | Spearman | Kendall |", "|---|---|---|"]
    for name, values in found_correlations.items():
        shown = " | ".join("-" if values[k] is None else f"{values[k]:.2f}" for k in ("spearman", "kendall"))
        lines.append(f"| {name} | {shown} |")
    lines += ["", *notes(results)]
    if unlearnt:
        lines.append(f"learnt no binding at any learning rate, so say nothing about recall: {', '.join(unlearnt)}")
    summary = {"cells": cells, "no_binding": mean(guesses), "unlearnt": unlearnt, "correlations": found_correlations}
    return "\n".join(lines), summary


def notes(results: Sequence[Result]) -> list[str]:
    """What a reader of the table must know: cells that differ in steps or settings, runs that were not as planned."""
    found = []
    if len({result["steps"] for result in results}) > 1:
        found.append(f"!!! cells differ in steps: { ({r['cell']: r['steps'] for r in results}) }")
    if any(result["settings"] != results[0]["settings"] for result in results):
        found.append("!!! cells differ in settings")
    missing = [cell for cell in RULER if cell not in {result["cell"] for result in results}]
    if missing:
        found.append(f"not run: {', '.join(missing)}")
    for result in results:
        eager = [run["lr"] for run in result["runs"] if run["mode"] == "eager"]
        if eager:
            found.append(f"eager, not captured: {result['cell']} at lr {eager}: {result['runs'][0]['fallback']}")
        if not result["complete"]:
            found.append(f"!!! {result['cell']} stopped at step {result['steps']} of {result['planned_steps']}")
    return found


def main() -> int:
    paths = [path for folder in sys.argv[1:] for path in sorted(Path(folder).glob("cell-*.json"))]
    if not paths:
        print("give folders with cell-*.json files", file=sys.stderr)
        return 2
    by_cell = {result["cell"]: result for result in (json.loads(path.read_text()) for path in paths)}
    print(report(list(by_cell.values()))[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
