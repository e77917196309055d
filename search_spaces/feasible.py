"""Whether the designs of a space can be built, as proxies and at the Deployment, and fit its memory budget."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pydantic import ValidationError

from nas.registry import get_mixer, mixers
from search_spaces.designs import architecture, architectures, routed
from search_spaces.problems import reason
from search_spaces.proxy import backbone_label
from search_spaces.schema import SearchSpace
from search_spaces.sizing import layer


def budget_problem(space: SearchSpace) -> str | None:
    """One line if no design of the space fits its memory budget, naming the smallest; else None."""
    if space.budget.kv_cache is None:
        return None
    limit = space.budget.kv_cache.limit(space.deployment)
    smallest = min(space.deployment.cost(found).kv_cache_bytes for found in architectures(space))
    if smallest <= limit:
        return None
    share = smallest / space.deployment.full_attention_bytes()
    return (
        f"budget.kv_cache={limit} bytes: no design of {space.name} fits; the smallest keeps {smallest} bytes "
        f"({share:.2%} of full attention)"
    )


def deployment_problem(space: SearchSpace) -> str | None:
    """One line if some design of the space cannot be built, as a proxy or at its Deployment, naming why; else None."""
    return _proxy_problem(space) or _routing_problem(space) or _deployed_problem(space)


def _proxy_problem(space: SearchSpace) -> str | None:
    # Layers first: every design has two kinds of them, and the one to blame is to be named.
    builds: list[tuple[str, Callable[[], object]]] = [
        (mixer, partial(layer, space, mixer)) for mixer in ("softmax", *space.mixers)
    ]
    builds += [(backbone_label(backbone), partial(architecture, space, backbone, ())) for backbone in space.backbones]
    if not all(isinstance(backbone, str) for backbone in space.backbones):
        builds.append(("designs", partial(architectures, space)))  # a part of a pattern may be larger than the whole
    return next((problem for label, build in builds if (problem := _unbuildable("proxy", label, build))), None)


def _routing_problem(space: SearchSpace) -> str | None:
    """A routing that no backbone can have would silently be none in every design."""
    pure = [architecture(space, backbone, ()) for backbone in space.backbones]
    for label in space.routing:
        if not any(routed(design, label) for design in pure):
            delta = ", ".join(name for name, mixer in mixers().items() if mixer.delta_rule)
            if any(get_mixer(name).delta_rule for name in space.linear_mixers):
                return f"routing {label!r} fits no backbone of this space: its delta-rule layers differ in their values"
            return (
                f"routing {label!r} needs a delta-rule backbone ({delta}); this space has "
                f"{', '.join(space.linear_mixers)}; allowed: clvr+linear, which extends CLVR to other linear layers"
            )
    return None


def _deployed_problem(space: SearchSpace) -> str | None:
    every, first = tuple(range(space.proxy.layers)), space.backbones[0]
    designs = [(backbone_label(backbone), architecture(space, backbone, ())) for backbone in space.backbones]
    designs += [("softmax", architecture(space, first, every, groups)) for groups in space.kv_groups]
    designs += [(name, found) for name, design in designs for x in space.routing if (found := routed(design, x))]
    if space.deployment.layers < space.proxy.layers:  # of a pattern the layers that are routed may be left out
        designs += [("designs", design) for design in architectures(space)]
    builds = ((name, partial(space.deployment.architecture, design)) for name, design in designs)
    return next((problem for name, build in builds if (problem := _unbuildable("deployment", name, build))), None)


def _unbuildable(where: str, name: str, build: Callable[[], object]) -> str | None:
    """Why `build` fails, and the field to change; `name` is a mixer, a pattern's label, or neither."""
    try:
        build()
    except ValueError as error:
        why = reason(error) if isinstance(error, ValidationError) else str(error)
        if why.startswith("sizing."):
            return why
        field = f"{where}.mixers.{name}" if name in mixers() else f"{where}.mixers"
        return f"{where}: {name} does not fit its sizes: {why}; set {field}{' or kv_groups' * (name == 'softmax')}"
    return None
