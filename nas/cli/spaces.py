"""`nas spaces`, `nas data`: what can be searched, and what it is trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from nas.cli.errors import Refused, refusing

if TYPE_CHECKING:
    from nas.architecture import Architecture
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
    from search_spaces.designs import architectures, backbone_labels
    from search_spaces.feasible import budget_problem

    found = load_space(space)
    deployment, full = found.deployment, found.deployment.full_attention_bytes()
    designs = architectures(found)
    costs = [deployment.cost(design).kv_cache_bytes for design in designs]
    lines = {
        "space": f"{found.name} is valid",
        "backbones": ", ".join(backbone_labels(found)),
        "routing": ", ".join(found.routing),
        "proxies": _proxies(designs),
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


def _proxies(designs: Sequence[Architecture]) -> str:
    """The range of their parameters and of their MLPs, which `sizing` widens or narrows."""
    from nas.cli import text
    from nas.cost import parameters

    counts = [parameters(design) for design in designs]
    widths = [design.intermediate_size for design in designs]
    return f"{_span(text.big, counts)} parameters, MLPs {_span(str, widths)} wide"


def _span(show: Callable[[int], str], numbers: Sequence[int]) -> str:
    low, high = show(min(numbers)), show(max(numbers))
    return low if low == high else f"{low} to {high}"


def _counts(space: SearchSpace) -> tuple[int, str]:
    """(designs, Candidates); a learning rate from a range has no count."""
    from search_spaces.designs import architectures, count

    candidates = count(space)
    return len(architectures(space)), "unlimited" if math.isinf(candidates) else str(int(candidates))


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
