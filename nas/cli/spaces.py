"""`nas spaces`, `nas cost`, `nas data`: what can be searched, what it costs, what it is trained on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nas.cli.errors import Refused, refusing
from nas.cli.options import JsonOption, print_json

if TYPE_CHECKING:
    from search_spaces import SearchSpace

SpaceArgument = Annotated[str, typer.Argument(metavar="NAME|FILE", help="A preset or a YAML file.")]

spaces_app = typer.Typer(help="List, print or check search spaces.", no_args_is_help=False)
data_app = typer.Typer(help="Look at the training data.", no_args_is_help=True)


@spaces_app.callback(invoke_without_command=True)
def spaces(context: typer.Context) -> None:
    """List, print or check search spaces."""
    if context.invoked_subcommand is None:
        list_spaces()


@spaces_app.command("list")
def list_spaces() -> None:
    """List the presets."""
    from nas.cli.tables import console, grid
    from search_spaces import load_space, preset_names

    table = grid("preset", "description", ">designs", ">trials")
    for name in preset_names():
        space = load_space(name)
        designs, candidates = _counts(space)
        table.add_row(name, space.description, str(designs), str(space.trials or candidates))
    console().print(table)


@spaces_app.command("show")
def show_space(space: SpaceArgument) -> None:
    """Print a space as YAML: the place to start from for a space of your own."""
    from search_spaces.loading import parse_space, read_text

    text = read_text(space)
    parse_space(text, space)
    typer.echo(text.rstrip())


@spaces_app.command("check")
def check_space(space: SpaceArgument) -> None:
    """Validate a space, count its designs and price them."""
    from nas.cli import text
    from nas.cli.tables import cache_range, print_pairs
    from search_spaces import load_space
    from search_spaces.designs import architectures, budget_problem

    found = load_space(space)
    deployment, full = found.deployment, found.deployment.full_attention_bytes()
    costs = [deployment.cost(design).kv_cache_bytes for design in architectures(found)]
    lines = {
        "space": f"{found.name} is valid",
        "designs": f"{len(costs)}, with their recipes {_counts(found)[1]} candidates",
        "kv_cache": cache_range(deployment, min(costs), max(costs)),
    }
    if found.budget.kv_cache is not None:
        limit = found.budget.kv_cache.limit(deployment)
        within = sum(cost <= limit for cost in costs)
        if problem := budget_problem(found):
            raise Refused(problem)
        lines["budget"] = f"{text.size(limit)} ({text.percent(limit / full)} of full attention): {within} designs fit"
    print_pairs(lines)


def _counts(space: SearchSpace) -> tuple[int, str]:
    """(designs, Candidates); a learning rate from a range has no count."""
    from search_spaces.designs import architectures, count

    candidates = count(space)
    return len(architectures(space)), "unlimited" if math.isinf(candidates) else str(int(candidates))


def cost(
    space: SpaceArgument,
    context: Annotated[
        str | None,
        typer.Option("--context", metavar="N,...", help="Tokens, such as 4k,32k.", show_default="the space's"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Price every design of a space at its Deployment, before any training."""
    from nas.cli.text import parse_contexts
    from search_spaces import load_space

    found = load_space(space)
    contexts = parse_contexts(context) if context else [found.deployment.context]
    rows = [row for tokens in contexts for row in cost_rows(found, tokens)]
    if as_json:
        print_json(rows)
    else:
        _print_costs(rows)


def cost_rows(space: SearchSpace, context: int) -> list[dict[str, Any]]:
    """One row a design, from the smallest cache to the largest."""
    from nas.search.records import design_name
    from search_spaces.designs import architectures

    deployment = space.deployment.model_copy(update={"context": context})
    full = deployment.full_attention_bytes()
    rows = []
    for design in architectures(space):
        price = deployment.cost(design)
        rows.append(
            {
                "design": design_name(design),
                "diagram": deployment.architecture(design).diagram,
                "context": context,
                "kv_cache_bytes": price.kv_cache_bytes,
                "kv_cache_ratio": price.kv_cache_bytes / full,
                "attention_bytes": price.attention_bytes,
                "recurrent_bytes": price.recurrent_bytes,
                "convolution_bytes": price.convolution_bytes,
                "parameters": price.parameters,
                "flops_per_token": price.flops_per_token,
            }
        )
    return sorted(rows, key=lambda row: (row["kv_cache_bytes"], row["design"]))


def _print_costs(rows: list[dict[str, Any]]) -> None:
    from nas.cli import text
    from nas.cli.tables import console, grid

    table = grid(
        "design",
        ">context",
        ">kv_cache",
        ">of full",
        ">attention",
        ">recurrent",
        ">convolution",
        ">parameters",
        ">FLOPs a token",
    )
    for row in rows:
        sizes = [text.size(row[f"{part}_bytes"]) for part in ("attention", "recurrent", "convolution")]
        table.add_row(
            row["design"],
            text.context(row["context"]),
            text.size(row["kv_cache_bytes"]),
            text.percent(row["kv_cache_ratio"]),
            *sizes,
            text.big(row["parameters"]),
            text.big(row["flops_per_token"]),
        )
    console().print(table)


@data_app.callback()
def data() -> None:
    """Look at the training data."""


@data_app.command("show")
def show_data(
    name: Annotated[str, typer.Argument(metavar="mqar|text", help="A recall task, or text.")],
    space: Annotated[str, typer.Option("--space", metavar="NAME|FILE", help="Whose data.")] = "cpu-demo",
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="Another seed draws another sample.")] = 0,
) -> None:
    """Print a sample of the training data that a person can read."""
    from search_spaces import load_space

    found = load_space(space)
    from nas.training.data.sample import sample_text

    with refusing(ValueError):
        typer.echo(sample_text(name, found.workload, seed, found.proxy.sequence_length))
