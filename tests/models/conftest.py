"""Small designs for the model room: one layer of each mixer, and one stack of all."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nas.architecture import Architecture, LayerSpec, Routing
from nas.models.configuration import HybridConfig
from nas.models.modeling import HybridForCausalLM

SPECS: dict[str, dict[str, Any]] = {
    "softmax": {"rope_theta": 10000.0, "kv_heads": 1},
    "windowed": {"mixer": "softmax", "rope_theta": 10000.0, "window": 24},
    "no_positions": {"mixer": "softmax"},
    "gated_deltanet": {"conv_size": 4, "expand_v": 2.0, "value_heads": 4},
    "deltanet": {"conv_size": 4},
    "gla": {"expand_v": 0.5, "conv_size": 4},
    "hgrn2": {"conv_size": 4},
    "hgrn": {"conv_size": 4},
    "retnet": {"expand_v": 2.0},
    "gated_deltanet_bare": {"mixer": "gated_deltanet"},
    "deltanet_bare": {"mixer": "deltanet"},
    "gla_bare": {"mixer": "gla"},
    "hgrn2_bare": {"mixer": "hgrn2"},
    "hgrn_bare": {"mixer": "hgrn"},
}
HYBRID = ("gated_deltanet", "hgrn2", "softmax", "hgrn", "hgrn2", "hgrn", "windowed", "gla", "retnet", "deltanet")


def design(*kinds: str, **fields: Any) -> Architecture:
    """A stack of width 32 over 50 symbols; each kind is a key of SPECS or one followed by its changes."""
    layers = [LayerSpec(**{"mixer": kind, "heads": 2, "head_dim": 16} | SPECS[kind]) for kind in kinds]
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 40, "embedding_std": 0.5}
    return Architecture(**sizes | {"initializer_range": 0.2} | fields, layers=tuple(layers))


def build(*kinds: str, seed: int = 0, clvr: bool = False, rank: int | None = None, **fields: Any) -> HybridForCausalLM:
    if clvr:
        fields["routing"] = Routing(kind="clvr", rank=rank)
    torch.manual_seed(seed)
    model: HybridForCausalLM = HybridForCausalLM(HybridConfig(architecture=design(*kinds, **fields).canonical()))
    return model.eval()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_model() -> Callable[..., HybridForCausalLM]:
    return build


@pytest.fixture
def make_design() -> Callable[..., Architecture]:
    return design


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`kinds`: each mixer alone in two layers, then the hybrid."""
    if "kinds" in metafunc.fixturenames:
        stacks = [(kind, kind) for kind in SPECS] + [HYBRID]
        metafunc.parametrize("kinds", stacks, ids=[*SPECS, "hybrid"])
