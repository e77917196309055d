"""The model card of an exported trial: the design drawn in text, its scores, its costs, and how it was made."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from nas._version import __version__
from nas.architecture import Architecture, Candidate, Recipe

_PACKAGES = ("torch", "triton", "flash-linear-attention", "transformers")


def model_card(facts: dict[str, Any], candidate: Candidate) -> str:
    """Markdown with the front matter that the Hugging Face hub reads.

    Args:
        facts: the trial's record (nas.search.records).
        candidate: what was trained.
    """
    trial = f"{facts['study']}/{facts['trial']}"
    recipe = candidate.recipe
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [hybrid-nas, linear-attention, {", ".join(facts["backbones"]) or "softmax"}]
---

# {facts["name"]}

A proxy of {candidate.architecture.hidden_size} hidden units and {len(candidate.architecture.layers)} layers, trained \
for {facts["step"]} steps by hybrid-nas {__version__} as trial {trial}. It \
shows what its design can recall; it is no language model to use.

```
{drawing(candidate.architecture)}
```

## Scores

| measure | value |
|---|---|
| recall (chance {facts["recall_chance"]:.3f}) | {_number(facts["recall"])} |
| validation loss, nats a token | {_number(facts["loss"])} |
| state | {facts["state"]}, rung {facts["rung"]}, seeds: {facts["seeds"]} |

## Cost, per sequence

| | at the Deployment | this proxy |
|---|---|---|
| layers | {facts["layers"]} | {facts["proxy_layers"]} |
| full-attention layers | {facts["full_attention_layers"]} | {facts["proxy_full_attention_layers"]} |
| parameters | {facts["parameters"]:,} | {facts["proxy_parameters"]:,} |
| keys and values, bytes | {facts["attention_bytes"]:,} | {facts["proxy_attention_bytes"]:,} |
| recurrent states, bytes | {facts["recurrent_bytes"]:,} | {facts["proxy_recurrent_bytes"]:,} |
| convolution states, bytes | {facts["convolution_bytes"]:,} | {facts["proxy_convolution_bytes"]:,} |
| all that decoding keeps, bytes | {facts["kv_cache_bytes"]:,} | {facts["proxy_kv_cache_bytes"]:,} |

At the Deployment that is {facts["kv_cache_ratio"]:.2%} of full attention's.

## Recipe

{recipe.optimizer}, learning rate {recipe.lr:.3g}{_scalar_lr(recipe)}, weight decay {recipe.weight_decay:g}, \
{recipe.warmup_steps} steps of warm-up of {recipe.total_steps}, {recipe.batch_size} sequences of \
{recipe.sequence_length} tokens a step. The exact Candidate and search space stand in `nas.json`.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
```

Written by `nas export {trial} --out OUT` with {", ".join(_versions())}.
"""


def drawing(architecture: Architecture) -> str:
    """One line a layer: its position, mixer and sizes."""
    lines = []
    for index, layer in enumerate(architecture.layers):
        heads = f"{layer.heads} x {layer.head_dim}"
        extra = f", {layer.kv_heads} KV head{'s' * (layer.kv_heads > 1)}" if layer.kv_heads else ""
        extra += f", {layer.value_heads} value heads" if layer.value_heads else ""
        extra += f", window {layer.window}" if layer.window else ""
        routed = f" -> {architecture.routing.label}" if index in architecture.routed_layers else ""
        mark = "#" if layer.is_full_attention else "w" if layer.window else "-"
        lines.append(f"{index:>3} {mark * 8} {layer.entry.title} ({heads}{extra}){routed}")
    return "\n".join(lines)


def _scalar_lr(recipe: Recipe) -> str:
    return f" (AdamW on the rest at {recipe.scalar_lr:.3g})" if recipe.scalar_lr else ""


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"


def _versions() -> list[str]:
    found = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue  # run from a source tree beside a package that is not installed as such
    return found
