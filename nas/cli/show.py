"""`nas show TRIAL`: one trial as text - its design, costs, recipe, scores, curves and failure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nas.cli.options import JsonOption, StorageOption, parse_trial, print_json, reading
from nas.settings import DEFAULT_STORAGE

if TYPE_CHECKING:
    from rich.table import Table

    from nas.architecture import Architecture, Candidate, LayerSpec
    from nas.store import MeasurementRow, StudyInfo, TrialRow

TrialArgument = Annotated[str, typer.Argument(metavar="TRIAL", help="STUDY/N, or N in the latest study.")]
CURVES = ("recall", "train_loss")


def show(trial: TrialArgument, storage: StorageOption = DEFAULT_STORAGE, as_json: JsonOption = False) -> None:
    """Show one trial: its design, what it costs, how it was trained, what it scored."""
    from nas.search.records import record

    study, wanted = parse_trial(trial)
    with reading(storage, study) as (store, info):
        row = store.trial(info.id, wanted)
        measurements = store.measurements(info.id, wanted)
    found = record(info.name, row)
    if as_json:
        print_json(found)
    else:
        _print(info, row, found, measurements)


def _print(info: StudyInfo, row: TrialRow, record: dict[str, Any], measurements: Sequence[MeasurementRow]) -> None:
    from nas.architecture import Candidate
    from nas.cli.tables import STATE_STYLES, console

    candidate = Candidate.model_validate(row.candidate)
    out = console()
    out.print(f"{info.name}/{row.number}  {record['name']}", style="bold", end="  ")
    out.print(row.state.value, style=STATE_STYLES[row.state.value])
    for title, body in (
        ("Design", _design(info, candidate.architecture)),
        ("Cost, per sequence", _costs(info, record)),
        ("Recipe", _recipe(candidate, record)),
        ("Scores", _scores(record, measurements)),
        ("Curves", _curves(measurements)),
    ):
        if body is not None:
            out.print(f"\n{title}", style="bold")
            out.print(body)
    if record["failure"]:
        out.print(f"\n{record['failure']}: {record['message']}", style="red")
    if row.traceback:
        out.print(row.traceback.rstrip(), style="dim")


def _design(info: StudyInfo, architecture: Architecture) -> str:
    from nas.cost import Deployment

    deployed = Deployment.model_validate(info.space["deployment"]).architecture(architecture)
    return "\n".join(
        (
            f"{architecture.diagram}  proxy (F full attention, w window, - linear)",
            f"{deployed.diagram}  at the Deployment",
            *_stack(architecture),
        )
    )


def _stack(architecture: Architecture) -> Iterator[str]:
    """The proxy from the input to the output; neighbouring layers of one kind share a line."""
    yield f"  {'embed':>7}  {architecture.vocab_size} x {architecture.hidden_size}"
    routed, widened = architecture.routed_layers, architecture.routing.kind == "wide_ffn"
    numbered = groupby(enumerate(architecture.layers), key=lambda item: item[1])
    for layer, group in numbered:
        numbers = [index for index, _ in group]
        where = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
        added = f" + {architecture.routing.label}" if numbers[0] in routed and not widened else ""
        yield f"  {where:>7}  {_layer(layer)}{added} + MLP {architecture.mlp_size(numbers[0])}"
    yield f"  {'head':>7}  {'tied' if architecture.tie_word_embeddings else 'own matrix'}"


def _layer(layer: LayerSpec) -> str:
    parts = [f"{layer.entry.title}, {layer.heads} head{'s' if layer.heads > 1 else ''} x {layer.head_dim}"]
    if layer.kv_heads:
        parts.append(f"{layer.kv_heads} KV head{'s' if layer.kv_heads > 1 else ''}")
    if layer.value_heads:
        parts.append(f"{layer.value_heads} value heads")
    if layer.expand_v != 1:
        parts.append(f"values x {layer.expand_v:g}")
    if layer.conv_size:
        parts.append(f"convolution {layer.conv_size}")
    if layer.window:
        parts.append(f"window {layer.window}")
    if layer.qk_norm:
        parts.append("QK-norm")
    if layer.is_softmax and not layer.rope_theta:
        parts.append("no positions")
    return ", ".join(parts)


def _costs(info: StudyInfo, record: dict[str, Any]) -> Table:
    from nas.cli import text
    from nas.cli.tables import grid

    deployment, proxy = info.space["deployment"], info.space["proxy"]
    table = grid("", ">at the Deployment", ">proxy")
    table.add_row("context", text.context(deployment["context"]), text.context(proxy["sequence_length"]))
    for key in ("kv_cache_bytes", "attention_bytes", "recurrent_bytes", "convolution_bytes"):
        label = key.removesuffix("_bytes") if key == "kv_cache_bytes" else f"  {key.removesuffix('_bytes')}"
        table.add_row(label, text.size(record[key]), text.size(record[f"proxy_{key}"]))
    table.add_row("of full attention", text.percent(record["kv_cache_ratio"]), "")
    for key, label in (("parameters", "parameters"), ("flops_per_token", "FLOPs a token")):
        table.add_row(label, text.big(record[key]), text.big(record[f"proxy_{key}"]))
    return table


def _recipe(candidate: Candidate, record: dict[str, Any]) -> str:
    recipe = candidate.recipe
    scalars = f" (AdamW on the rest at {recipe.scalar_lr or recipe.lr:.3g})" if recipe.optimizer == "muon" else ""
    return (
        f"{recipe.optimizer}, learning rate {recipe.lr:.3g}{scalars}, weight decay {recipe.weight_decay:g}\n"
        f"batches of {recipe.batch_size} x {recipe.sequence_length} tokens, warm-up {recipe.warmup_steps} of "
        f"{recipe.total_steps} steps, decay over the last {recipe.decay_fraction:.0%}\n"
        f"from {record['prior']}, {record['step']} steps done in {record['seconds']:.0f} s"
    )


def _scores(record: dict[str, Any], measurements: Sequence[MeasurementRow]) -> Table | None:
    from nas.cli import text
    from nas.cli.tables import grid

    if record["recall"] is None:
        return None
    table = grid("", ">", "", header=False)
    table.add_row("recall", text.number(record["recall"]), f"chance {text.number(record['recall_chance'])}")
    last = {found.name: found for found in measurements if found.step <= record["step"]}
    sizes = [found for name, found in last.items() if name.startswith("recall/")]
    for found in sorted(sizes, key=lambda found: _natural(found.name)):
        task, _, count = found.name.removeprefix("recall/").rpartition("/")
        table.add_row(f"  {task} {count}", text.number(found.value), f"step {found.step}")
    table.add_row("loss", text.number(record["loss"]), "nats a token of held-out text")
    for name, unit in (("bits_per_byte", "bits a byte"), ("tokens_per_second", "tokens a second")):
        if name in last:
            table.add_row(name, text.number(last[name].value, ".3f" if unit == "bits a byte" else ",.0f"), unit)
    return table


def _natural(name: str) -> tuple[str, int]:
    head, _, tail = name.rpartition("/")
    return (head, int(tail)) if tail.isdecimal() else (name, 0)


def _curves(measurements: Sequence[MeasurementRow]) -> Table | None:
    from nas.cli import text
    from nas.cli.tables import grid

    table = grid("", "", "", header=False)
    for name in CURVES:
        points = [found for found in measurements if found.name == name]
        if len(points) > 1:
            first, last = points[0], points[-1]
            ends = f"{first.value:.3f} -> {last.value:.3f}, steps {first.step} to {last.step}"
            table.add_row(name, text.sparkline([found.value for found in points]), ends)
    return table if table.row_count else None
