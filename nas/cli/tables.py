"""Tables of designs and trials for a terminal; wide and without colour where the output is none."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from nas.cli import text

if TYPE_CHECKING:
    from nas.cost import Deployment

Record = Mapping[str, Any]

_PLAIN_WIDTH = 200
WIDE = 100
"""Columns from which a table of the Front also has the layers and the loss."""
STATE_STYLES = {
    "waiting": "dim",
    "running": "cyan",
    "paused": "yellow",
    "complete": "green",
    "pruned": "dim",
    "failed": "red",
    "infeasible": "dim red",
}


def console() -> Console:
    """Standard output. Nothing in what is printed is taken for markup: messages hold brackets."""
    plain = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=_PLAIN_WIDTH if plain else None, markup=False, highlight=False, emoji=False)


def grid(*columns: str, header: bool = True) -> Table:
    """An unframed table; a column whose name starts with ">" is aligned to the right."""
    table = Table(
        box=box.SIMPLE_HEAD if header else None,
        show_header=header,
        show_edge=False,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        header_style="bold",
    )
    for name in columns:
        right = name.startswith(">")
        table.add_column(name.lstrip(">"), justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table


def print_pairs(pairs: Mapping[str, str]) -> None:
    """One line a pair, labels aligned."""
    table = grid("", "", header=False)
    for label, value in pairs.items():
        table.add_row(label, value)
    console().print(table)


def cache_range(deployment: Deployment, cheapest: int, dearest: int) -> str:
    """The memory of a space's designs, in bytes and as shares of full attention."""
    full = deployment.full_attention_bytes()
    shares = f"{text.percent(cheapest / full)} to {text.percent(dearest / full)} of full attention"
    return f"{text.size(cheapest)} to {text.size(dearest)} at {text.context(deployment.context)} tokens, {shares}"


def recipe(record: Record) -> str:
    return f"{record['optimizer']} {record['lr']:.2g}"


def design(record: Record) -> str:
    return f"{record['name']} (baseline)" if record["prior"] == "baseline" else str(record["name"])


def print_front(front: Sequence[Record], records: Sequence[Record], *, everything: bool = False) -> None:
    """The Front from the smallest cache to the largest; below it, dimmed, the baselines that are not on it.

    Args:
        front: rows of `nas.search.front.front`.
        records: all trials of the study.
        everything: below stand all complete designs, not the baselines alone.
    """
    from nas.search.front import best_recipes, full_attention, reference, relative_recall

    out = console()
    table = grid("design", "layers", ">recall", ">vs full", ">kv_cache", ">of full", ">loss", "recipe", ">trial")
    if out.width < WIDE:
        table = grid("design", ">recall", ">vs full", ">kv_cache", ">of full", "recipe", ">trial")
    learnt = [found] if (found := reference(records)) else []
    listed = {row["architecture_digest"] for row in front}
    rest = [row for row in best_recipes(records) if row["architecture_digest"] not in listed]
    rest = [row for row in rest if everything or row["prior"] == "baseline"]
    rest.sort(key=lambda row: (row["kv_cache_bytes"], row["trial"]))
    for row in (*front, *rest):
        layers, loss = ([row["diagram"]], [text.number(row["loss"])]) if out.width >= WIDE else ([], [])
        table.add_row(
            design(row),
            *layers,
            _recall(row),
            text.percent(relative_recall(row, learnt)),
            text.size(row["kv_cache_bytes"]),
            text.percent(row["kv_cache_ratio"]),
            *loss,
            recipe(row),
            str(row["trial"]),
            style=None if row["architecture_digest"] in listed else "dim",
        )
    out.print(table)
    chance = text.number(next((row["recall_chance"] for row in records), None))
    below = f"; the last {text.count(len(rest), 'row')} not on the Front" if rest else ""
    out.print(f"recall at chance: {chance}; vs full, of full: relative to full attention{below}", style="dim")
    if not learnt and (baseline := full_attention(records)):
        out.print(
            f"full attention itself recalls {text.number(baseline['recall'])}, under half of the best: it has not "
            "learnt the task at this budget, so there is no 'vs full'",
            style="dim",
        )


def _recall(row: Record) -> str:
    """With its standard deviation where there are several seeds, and a note where it is no better than guessing."""
    spread = f" ±{row['recall_sd']:.3f}" if row["recall_sd"] is not None else ""
    return text.number(row["recall"]) + spread + (" at chance" if row.get("uninformative") else "")


def trials_table(records: Iterable[Record]) -> Table:
    table = grid(
        ">trial", "state", "design", "layers", ">recall", ">kv_cache", ">of full", ">loss", "recipe", ">step", "note"
    )
    for row in records:
        note = (
            f"{row['failure']}: {row['message']}"
            if row["failure"]
            else ""
            if row["prior"] == "sampled"
            else row["prior"]
        )
        table.add_row(
            str(row["trial"]),
            row["state"],
            row["name"],
            row["diagram"],
            text.number(row["recall"]),
            text.size(row["kv_cache_bytes"]),
            text.percent(row["kv_cache_ratio"]),
            text.number(row["loss"]),
            recipe(row),
            str(row["step"]),
            note,
            style=STATE_STYLES.get(row["state"]),
        )
    return table


def empty_front(study: str, records: Iterable[Record]) -> str:
    """Why there is nothing on the Front."""
    complete = sum(record["state"] == "complete" for record in records)
    if not complete:
        return f"study {study}: no trial is complete yet; nas status {study} shows how far it has come"
    return (
        f"study {study}: {text.count(complete, 'complete trial')}, all at chance, as full attention is: this proxy, or "
        f"its budget, is too small to tell designs apart (nas front {study} --all)"
    )
