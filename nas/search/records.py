"""One flat dict a trial: what `--json`, the Python API and the dashboard show. Keys are added, never renamed."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from nas.architecture import Architecture, Candidate, LayerSpec
from nas.cost import Cost, cost
from nas.store import Store, StudyInfo, TrialRow
from search_spaces.schema import SearchSpace


def facts(space: SearchSpace, candidate: Candidate) -> dict[str, Any]:
    """What is known of a Candidate before it trains; stored with the trial. Costs are at the Deployment; the twins
    `proxy_*` are those of the proxy as trained, at its own sequence length."""
    proxy = candidate.architecture
    deployed = space.deployment.architecture(proxy)
    price = space.deployment.cost(proxy)
    limit = space.budget.kv_cache.limit(space.deployment) if space.budget.kv_cache else None
    trained = cost(proxy, candidate.recipe.sequence_length, "float32")
    return {
        "candidate_digest": candidate.digest,
        "architecture_digest": proxy.digest,
        "recipe_digest": candidate.recipe.digest,
        "name": design_name(proxy),
        "diagram": proxy.diagram,
        "deployed_diagram": deployed.diagram,
        "recall_chance": space.workload.chance,
        "kv_cache_ratio": price.kv_cache_bytes / space.deployment.full_attention_bytes(),
        "within_budget": limit is None or price.kv_cache_bytes <= limit,
        **_sizes(deployed, price),
        **{f"proxy_{key}": value for key, value in _sizes(proxy, trained).items()},
        "routing": proxy.routing.label,
        "optimizer": candidate.recipe.optimizer,
        "lr": candidate.recipe.lr,
    }


def _sizes(architecture: Architecture, price: Cost) -> dict[str, Any]:
    return {
        "kv_cache_bytes": price.kv_cache_bytes,
        "attention_bytes": price.attention_bytes,
        "recurrent_bytes": price.recurrent_bytes,
        "convolution_bytes": price.convolution_bytes,
        "parameters": price.parameters,
        "flops_per_token": price.flops_per_token,
        "layers": len(architecture.layers),
        "full_attention_layers": list(architecture.full_attention_layers),
        "backbones": list(architecture.backbones),
        "placement": architecture.placement,
        "kv_heads": architecture.kv_heads,
    }


def design_name(architecture: Architecture) -> str:
    """A short name for people: backbone, ratio or placement, and what else differs from the plain design."""
    full, layers = architecture.full_attention_layers, len(architecture.layers)
    backbone = _backbone_name(architecture)
    softmax = next((x for x in sorted(architecture.layers, key=_full_first) if x.is_softmax), None)
    groups = softmax.heads // (softmax.kv_heads or softmax.heads) if softmax else 1
    grouped = f" GQA{groups}" if groups > 1 else ""
    if not backbone:
        return f"Full attention{grouped}"
    if not full:
        where = "pure"
    elif architecture.placement == "interleaved":
        where = f"{full[0] + 1}:1"
    elif architecture.placement == "custom":
        where = "at " + ",".join(map(str, full))
    else:
        where = f"{len(full)}/{layers} {architecture.placement}"
    routing = architecture.routing
    routed = " +" + routing.label.replace(routing.kind, _ROUTING[routing.kind], 1) if routing.kind in _ROUTING else ""
    return f"{backbone} {where}{grouped}{routed}"


def _full_first(layer: LayerSpec) -> bool:
    return not layer.is_full_attention


def _backbone_name(architecture: Architecture) -> str:
    """The layers that are not full attention, as far as they do not repeat: 2 Gated DeltaNet + SWA512."""
    rest = [layer for layer in architecture.layers if not layer.is_full_attention]
    names = [f"SWA{layer.window}" if layer.is_softmax else layer.entry.title for layer in rest]
    period = next((n for n in range(1, len(names)) if names[n:] == names[:-n]), len(names))
    runs = [(name, len(list(group))) for name, group in groupby(names[:period])]
    return " + ".join(name if count == 1 else f"{count} {name}" for name, count in runs)


_ROUTING = {
    "clvr": "CLVR",
    "cler": "CLER",
    "cler_h": "CLER-H",
    "self_transform": "self-transform",
    "wide_ffn": "wide FFN",
}


def progress_line(study: str, row: TrialRow) -> str:
    """One line about a trial that has just been scored."""
    known = row.facts
    return (
        f"{study}/{row.number} {known['name']}, {known['optimizer']} lr {known['lr']:.2g}: "
        f"recall {row.recall:.2f} at step {row.step}, cache {known['kv_cache_ratio']:.1%} of full attention"
    )


def record(study: str, row: TrialRow) -> dict[str, Any]:
    """The record of one stored trial; absent values are None."""
    return {
        "study": study,
        "trial": row.number,
        "state": row.state.value,
        "failure": row.failure.value if row.failure else None,
        "message": row.message,
        "recall": row.recall,
        "recall_sd": None,
        "recall_nll": row.recall_nll,
        "loss": row.loss,
        **row.facts,
        "seeds": 1,
        "rung": row.rung,
        "step": row.step,
        "seconds": row.seconds,
        "prior": row.prior,
    }


def load(store: Store, study: str | StudyInfo | None = None) -> list[dict[str, Any]]:
    """Records of all trials of a study (the latest if None), in trial order."""
    info = study if isinstance(study, StudyInfo) else store.study(study)
    return [record(info.name, row) for row in store.trials(info.id)]
