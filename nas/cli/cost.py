"""`nas cost`: what designs keep in memory and what they compute, before any training."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nas.cli.errors import Refused
from nas.cli.options import JsonOption, print_json

if TYPE_CHECKING:
    from nas.architecture import Architecture
    from nas.cost import DType

_COMPUTE, _CONTEXT = 100, 120
"""Widths from which a table also has parameters and FLOPs, and from which the context is a column; below, the designs
stand under one heading a context."""


@dataclass(frozen=True)
class Designs:
    """What is priced together, at one scale: designs by unique name, beside the full-attention model."""

    stacks: dict[str, Architecture]
    reference: Architecture
    context: int
    dtype: DType
    state_dtype: DType


def cost(
    given: Annotated[
        str,
        typer.Argument(metavar="NAME|FILE", help="A preset, a YAML file, or a JSON file with one architecture."),
    ],
    context: Annotated[
        str | None,
        typer.Option("--context", metavar="N,...", help="Tokens, such as 4k,32k,1m.", show_default="the Deployment's"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Price designs before any training: all of a space at its Deployment, or one architecture as it stands.

    An architecture is its canonical JSON, or the config.json of an exported model.
    """
    from nas.cli.text import parse_contexts

    contexts = None if context is None else parse_contexts(context)
    designs = read_designs(given)
    rows = cost_rows(designs, contexts or [designs.context])
    if as_json:
        print_json(rows)
    else:
        _print(designs, rows)


def read_designs(given: str) -> Designs:
    """The designs of a preset, a space's YAML file, or a JSON file that holds an Architecture.

    Raises:
        SpaceError: no such preset or file, or a bad space.
        Refused: a bad architecture.
    """
    from search_spaces.loading import read_text

    text = read_text(given)
    if given.lower().endswith(".json"):
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Refused(f"{given}: not valid JSON: {error}") from error
        if isinstance(content, dict) and ("architecture" in content or "layers" in content):
            return _one_design(content.get("architecture", content), given)
    return _space_designs(text, given)


def _one_design(content: object, origin: str) -> Designs:
    """An architecture at its own sizes, at the context and in the types of the default Deployment."""
    from pydantic import ValidationError

    from nas.architecture import Architecture
    from nas.cost import Deployment, full_attention
    from nas.search.records import design_name
    from search_spaces.problems import describe

    try:
        found = Architecture.model_validate(content)
    except ValidationError as error:
        raise Refused(f"{origin}: {describe(error, Architecture)}") from error
    default = Deployment()
    return Designs(
        {design_name(found): found}, full_attention(found), default.context, default.dtype, default.state_dtype
    )


def _space_designs(text: str, origin: str) -> Designs:
    """Full attention, then every other design of a space in the space's order, all at its Deployment."""
    from search_spaces.designs import architectures, baselines
    from search_spaces.loading import parse_space

    space = parse_space(text, origin)
    deployment = space.deployment
    proxies: dict[str, Architecture] = {}
    for proxy in (baselines(space)[0].architecture, *architectures(space)):
        proxies.setdefault(deployment.architecture(proxy).digest, proxy)
    stacks = {name: deployment.architecture(proxy) for name, proxy in unique_names(list(proxies.values())).items()}
    return Designs(stacks, deployment.full_attention(), deployment.context, deployment.dtype, deployment.state_dtype)


def unique_names(designs: Sequence[Architecture]) -> dict[str, Architecture]:
    """The designs by name; those that share one have the start of their digest added to it."""
    from nas.search.records import design_name

    names = [design_name(design) for design in designs]
    return {
        name if names.count(name) == 1 else f"{name} [{design.digest[:6]}]": design
        for name, design in zip(names, designs, strict=True)
    }


def cost_rows(designs: Designs, contexts: Sequence[int]) -> list[dict[str, Any]]:
    """One row a design, at each context in turn."""
    from nas.cost import break_even_context, cost

    types = (designs.dtype, designs.state_dtype)
    even = {name: break_even_context(stack, designs.reference, *types) for name, stack in designs.stacks.items()}
    rows: list[dict[str, Any]] = []
    for context in contexts:
        full = cost(designs.reference, context, *types).kv_cache_bytes
        for name, stack in designs.stacks.items():
            price = cost(stack, context, *types)
            rows.append(
                {
                    "design": name,
                    **price.model_dump(),
                    "kv_cache_bytes": price.kv_cache_bytes,
                    "kv_cache_ratio": price.kv_cache_bytes / full,
                    "break_even_context": even[name],
                    **_facts(stack),
                }
            )
    return rows


def _facts(stack: Architecture) -> dict[str, Any]:
    return {
        "backbones": list(stack.backbones),
        "layers": len(stack.layers),
        "full_attention_layers": list(stack.full_attention_layers),
        "placement": stack.placement,
        "kv_heads": stack.kv_heads,
        "routing": stack.routing.label,
        "diagram": stack.diagram,
    }


def _print(designs: Designs, rows: Sequence[dict[str, Any]]) -> None:
    from nas.cli import text
    from nas.cli.tables import console, grid

    out = console()
    headed, computes = out.width < _CONTEXT, out.width >= _COMPUTE
    columns = ["design", *([] if headed else [">context"]), ">KV", ">state", ">conv", ">total", ">of full", ">even at"]
    table = grid(*columns, *((">params", ">FLOPs", ">P1") if computes else ()))
    for context, group in groupby(rows, key=lambda row: text.context(row["context"])):
        table.add_section()
        if headed:
            table.add_row(f"at {context}", style="bold")
        for row in group:
            parts = ("attention", "recurrent", "convolution", "kv_cache")
            counts = ("parameters", "flops_per_token", "p1_mixer_flops_per_token") if computes else ()
            table.add_row(
                row["design"],
                *([] if headed else [context]),
                *(text.size(row[f"{part}_bytes"]) for part in parts),
                text.percent(row["kv_cache_ratio"]),
                str(row["break_even_context"] or "never"),
                *(text.big(row[name]) for name in counts),
            )
    out.print(table)
    for line in _notes(designs):
        out.print(line, style="dim")


def _notes(designs: Designs) -> Iterator[str]:
    stack = designs.reference
    yield (
        f"{len(stack.layers)} layers of width {stack.hidden_size}; bytes a sequence, {designs.dtype} with states in "
        f"{designs.state_dtype}; total = KV + state + conv; one MLP width for all, so params differ"
    )
    yield (
        "of full: relative to multi-head softmax attention in every layer; even at: the shortest context at which a "
        "design keeps no more than that"
    )
    yield (
        "FLOPs: of one token decoded at the end of the context; P1: of its mixers alone, counted as in "
        "arXiv:2507.06457, appendix B"
    )
