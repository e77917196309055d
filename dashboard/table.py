"""The trial table: one row a trial, numbers kept as numbers so that every column sorts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import style
from dashboard.style import Record, finite


def filtered(records: Sequence[Record], states: Collection[str], backbones: Collection[str]) -> list[Record]:
    """The records of these states and backbone labels; an empty collection stands for all."""
    return [
        found
        for found in records
        if (not states or found["state"] in states) and (not backbones or style.backbone_label(found) in backbones)
    ]


def frame(records: Sequence[Record], front: Sequence[Record]) -> pd.DataFrame:
    """The table's content; a number that is absent or not finite is an empty cell."""
    best = {found["trial"] for found in front}
    return pd.DataFrame([_row(found, found["trial"] in best) for found in records], columns=list(columns()))


def _row(found: Record, on_front: bool) -> dict[str, Any]:
    memory, ratio, parameters = (finite(found[key]) for key in ("kv_cache_bytes", "kv_cache_ratio", "parameters"))
    return {
        "front": "★" if on_front else "",
        "trial": found["trial"],
        "design": found["name"],
        "layers": "".join({"F": "■", "w": "▣"}.get(layer, "□") for layer in found["diagram"]),
        "state": style.state_text(found),
        "recall": finite(found["recall"]),
        "loss": finite(found["loss"]),
        "memory": None if memory is None else memory / 2**20,
        "share": None if ratio is None else 100 * ratio,
        "parameters": None if parameters is None else parameters / 1e6,
        "optimizer": found["optimizer"],
        "lr": finite(found["lr"]),
        "step": found["step"],
        "seconds": finite(found["seconds"]),
        "origin": found["prior"],
    }


def columns() -> dict[str, Any]:
    """Titles, units and formats by column of `frame`."""
    config = st.column_config
    return {
        "front": config.TextColumn("", help="★ on the front", width=36),
        "trial": config.NumberColumn("Trial", width=60),
        "design": config.TextColumn("Design", width="medium"),
        "layers": config.TextColumn("Layers", help="■ full attention, □ linear; the proxy's stack", width="small"),
        "state": config.TextColumn("State", width=125),
        "recall": config.ProgressColumn("Recall", min_value=0, max_value=1, format="%.3f", width="small"),
        "loss": config.NumberColumn("Loss", help="validation nats per token", format="%.3f", width=70),
        "memory": config.NumberColumn("KV cache", help="per sequence at deployment", format="%.0f MiB", width=95),
        "share": config.NumberColumn("of full", help="share of full attention's memory", format="%.1f %%", width=75),
        "parameters": config.NumberColumn("Parameters", help="at deployment", format="%.0f M", width=95),
        "optimizer": config.TextColumn("Optimiser", width=85),
        "lr": config.NumberColumn("LR", format="%.2e", width=80),
        "step": config.NumberColumn("Step", width=60),
        "seconds": config.NumberColumn("Time", help="training time", format="%.0f s", width=70),
        "origin": config.TextColumn("Origin", width=85),
    }
