"""Small pieces of HTML: the figures at the top of the page and the card of the selected trial."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape

from dashboard import style
from dashboard.data import Snapshot, best_recall
from dashboard.style import FAINT, INK, LINE, MUTED, Record, finite
from nas.search.front import at_chance, relative_recall

_STATE_COLOURS = {
    "complete": "#0b7a4b",
    "running": "#0f4c81",
    "paused": "#6d5bd0",
    "pruned": "#8a6d1a",
    "failed": "#b3261e",
    "infeasible": "#b3261e",
}

STYLE = f"""<style>
.stMainBlockContainer {{padding-top: 2.2rem; padding-bottom: 3rem; max-width: 1560px;}}
.stApp header {{background: transparent;}}
.nas-title {{font-size: 1.75rem; font-weight: 650; color: {INK}; line-height: 1.2;}}
.nas-title small {{display: block; font-size: .95rem; font-weight: 400; color: {MUTED}; margin-top: .2rem;}}
.nas-tiles {{display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: .8rem;}}
.nas-tile {{border: 1px solid {LINE}; border-radius: 10px; padding: .7rem .95rem; background: white;}}
.nas-tile b {{display: block; font-size: 1.6rem; font-weight: 600; color: {INK}; line-height: 1.3;}}
.nas-tile span, .nas-tile i {{display: block; font-style: normal; font-size: .82rem; color: {MUTED};}}
.nas-tile i {{white-space: nowrap; overflow: hidden; text-overflow: ellipsis;}}
.nas-head {{font-size: 1.02rem; font-weight: 600; color: {INK}; margin-top: .3rem;}}
.nas-name {{font-size: 1.25rem; font-weight: 620; color: {INK}; line-height: 1.3;}}
.nas-pill {{display: inline-block; border-radius: 99px; padding: 0 .6rem; font-size: .78rem; color: white;
  line-height: 1.35rem; vertical-align: middle; margin-left: .4rem; font-weight: 500;}}
.nas-message {{color: #b3261e; font-size: .85rem; margin-top: .3rem;}}
.nas-label {{font-size: .8rem; color: {MUTED}; margin: .65rem 0 .3rem;}}
.nas-blocks {{display: flex; gap: 3px;}}
.nas-blocks div {{flex: 1; max-width: 44px; height: 22px; border-radius: 4px;}}
.nas-key {{font-size: .8rem; color: {MUTED}; margin-top: .4rem;}}
.nas-key u {{display: inline-block; width: .7rem; height: .7rem; border-radius: 3px; margin: 0 .3rem 0 0;}}
.nas-key span {{margin-right: .9rem;}}
.nas-scores {{display: flex; gap: 1.6rem; margin: 1rem 0 .9rem;}}
.nas-scores span {{display: block; font-size: .8rem; color: {MUTED};}}
.nas-scores b {{font-size: 1.3rem; font-weight: 600; color: {INK};}}
.nas-table {{width: 100%; border-collapse: collapse; font-size: .86rem; color: {INK}; margin-top: .1rem;}}
.nas-table td, .nas-table th {{text-align: right; padding: .16rem 0; border-bottom: 1px solid {LINE};}}
.nas-table th {{font-weight: 400; color: {FAINT}; font-size: .78rem;}}
.nas-table td:first-child, .nas-table th:first-child {{text-align: left; color: {MUTED};}}
.nas-table tr:last-child td {{border-bottom: none;}}
</style>"""

_COSTS = (
    ("KV cache", "kv_cache_bytes"),
    ("· keys and values", "attention_bytes"),
    ("· recurrent state", "recurrent_bytes"),
    ("· convolution", "convolution_bytes"),
)


def title(snapshot: Snapshot | None) -> str:
    about = "Recall against memory of hybrid linear-attention language models"
    if snapshot is not None and snapshot.study.space.get("description"):
        about = str(snapshot.study.space["description"])
    return f'<div class="nas-title">Hybrid architecture search<small>{escape(about)}</small></div>'


def head(text: str) -> str:
    return f'<div class="nas-head">{escape(text)}</div>'


def tiles(snapshot: Snapshot) -> str:
    """The row of figures: trials, best recall, best recall in a quarter of the memory, hypervolume, time."""
    states = Counter(found["state"] for found in snapshot.records)
    best, small = best_recall(snapshot.records), best_recall(snapshot.records, ratio=0.25)
    volume = snapshot.hypervolume[-1][1] if snapshot.hypervolume else None
    trained = sum(finite(found["seconds"]) or 0.0 for found in snapshot.records)
    cells = (
        ("Trials", str(len(snapshot.records)), ", ".join(f"{count} {state}" for state, count in states.most_common())),
        ("Best recall", *_best(best)),
        ("Best in ¼ of the memory", *_best(small)),
        ("Hypervolume", style.score_text(volume, 2), f"{len(snapshot.front)} designs on the front"),
        ("Elapsed", style.duration_text(snapshot.elapsed), f"{style.duration_text(trained)} of training"),
    )
    return '<div class="nas-tiles">' + "".join(_tile(*cell) for cell in cells) + "</div>"


def _tile(label: str, value: str, detail: str) -> str:
    body = f'<span>{escape(label)}</span><b>{escape(value)}</b><i title="{escape(detail)}">{escape(detail)}</i>'
    return f'<div class="nas-tile">{body}</div>'


def _best(found: Record | None) -> tuple[str, str]:
    if found is None:
        return style.score_text(None), "no complete trial yet"
    share = style.percent_text(found["kv_cache_ratio"])
    return style.score_text(found["recall"]), f"{found['name']} · {share}"


def card(found: Record, snapshot: Snapshot) -> str:
    """The selected trial: its design drawn, its scores, what it costs and how it was trained."""
    shade = _STATE_COLOURS.get(found["state"], MUTED)
    star = " ★" if any(found["trial"] == row["trial"] for row in snapshot.front) else ""
    pill = f'<span class="nas-pill" style="background:{shade}">{escape(style.state_text(found))}</span>'
    message = f'<div class="nas-message">{escape(found["message"])}</div>' if found.get("message") else ""
    return (
        f'<div class="nas-name">{escape(found["name"])}{star}{pill}</div>{message}'
        + _blocks(f"Proxy, {found['proxy_layers']} layers", found["diagram"], found)
        + _blocks(f"At deployment, {found['layers']} layers", _deployed(found), found)
        + _key(found)
        + _scores(found, snapshot)
        + _costs(found)
        + _recipe(found)
    )


def _deployed(found: Record) -> str:
    if found.get("deployed_diagram"):
        return str(found["deployed_diagram"])
    full = set(found["full_attention_layers"])  # a trial older than the key: there were no windows
    return "".join("F" if layer in full else "-" for layer in range(found["layers"]))


def _shades(found: Record) -> dict[str, str]:
    return {"F": style.colour(()), "w": FAINT, "-": style.colour(found["backbones"] or ())}


def _blocks(label: str, diagram: str, found: Record) -> str:
    shades = _shades(found)
    cells = "".join(f'<div style="background:{shades[layer]}"></div>' for layer in diagram)
    return f'<div class="nas-label">{escape(label)}</div><div class="nas-blocks">{cells}</div>'


def _key(found: Record) -> str:
    shades = _shades(found)
    names = {"-": style.backbone_label(found), "F": style.FULL_ATTENTION, "w": "Window attention"}
    entries = (
        f'<span><u style="background:{shades[layer]}"></u>{escape(names[layer])}</span>'
        for layer in ("-", "F", "w")
        if layer in found["diagram"]
    )
    return f'<div class="nas-key">{"".join(entries)}</div>'


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in header) + "</tr>" if header else ""
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<table class="nas-table">{top}{body}</table>'


def _scores(found: Record, snapshot: Snapshot) -> str:
    share = relative_recall(found, [snapshot.baseline]) if snapshot.baseline else None
    chance = style.score_text(found["recall_chance"], 2)
    recall = style.score_text(found["recall"])
    spread = finite(found["recall_sd"])
    cells = (
        ("Recall", recall + (f" ± {spread:.3f}" if spread is not None else "")),
        ("of full attention's", style.percent_text(share)),
        ("Loss", style.score_text(found["loss"])),
    )
    boxes = "".join(f"<div><span>{escape(label)}</span><b>{escape(value)}</b></div>" for label, value in cells)
    note = f'<div class="nas-message">Not told apart from chance, {chance}.</div>' if at_chance(found) else ""
    return f'<div class="nas-scores">{boxes}</div>{note}'


def _costs(found: Record) -> str:
    rows = [
        (label, style.bytes_text(found[key]), style.bytes_text(found[f"proxy_{key}"]))
        for label, key in _COSTS
        if key == "kv_cache_bytes" or found[key]
    ]
    rows.insert(1, ("of full attention's", style.percent_text(found["kv_cache_ratio"]), ""))
    rows.append(("Parameters", style.count_text(found["parameters"]), style.count_text(found["proxy_parameters"])))
    return _table(("Memory per sequence", "deployment", "proxy"), rows)


def _recipe(found: Record) -> str:
    rows = (
        ("Optimiser", f"{found['optimizer']}, lr {style.rate_text(found['lr'])}"),
        ("Routing", str(found["routing"])),
        ("Trained", f"{found['step']} steps, {style.duration_text(found['seconds'])}"),
        ("Origin", str(found["prior"])),
    )
    return '<div class="nas-label">How it was trained</div>' + _table((), rows)
