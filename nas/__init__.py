"""Architecture search for hybrid linear-attention language models. Names load when they are first used."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nas._version import __version__

if TYPE_CHECKING:
    from nas.api import Study, Trial, launch, load_study
    from nas.architecture import Architecture, Candidate, LayerSpec, Recipe, Routing
    from nas.cost import Deployment, cost
    from search_spaces import SearchSpace, load_space

_HOMES = {
    "nas.api": ("Study", "Trial", "launch", "load_study"),
    "nas.architecture": ("Architecture", "Candidate", "LayerSpec", "Recipe", "Routing"),
    "nas.cost": ("Deployment", "cost"),
    "search_spaces": ("SearchSpace", "load_space"),
}

__all__ = [
    "Architecture",
    "Candidate",
    "Deployment",
    "LayerSpec",
    "Recipe",
    "Routing",
    "SearchSpace",
    "Study",
    "Trial",
    "__version__",
    "cost",
    "launch",
    "load_space",
    "load_study",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(home), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'nas' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """Keeps `nas.cost` the function: whoever imports the module nas.cost makes Python bind it here."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.cost if name == "cost" and isinstance(value, ModuleType) else value)


sys.modules[__name__].__class__ = _Package
