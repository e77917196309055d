"""Small designs for the model room: one layer of each mixer, and one stack of all."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nas.architecture import Architecture, LayerSpec, Routing
from nas.models.configuration import HybridConfig
from nas.models.modeling import HybridForCausalLM
from nas.registry import linear_mixers

SPECS: dict[str, dict[str, Any]] = {
    "softmax": {"rope_theta": 10000.0, "kv_heads": 1},
    "windowed": {"mixer": "softmax", "rope_theta": 10000.0, "window": 24},
    "no_positions": {"mixer": "softmax"},
    "grouped": {"mixer": "softmax", "heads": 6, "head_dim": 8, "kv_heads": 2, "rope_theta": 500000.0},
    "normed": {"mixer": "softmax", "rope_theta": 10000.0, "qk_norm": True},
    "windowed_normed": {"mixer": "softmax", "heads": 4, "head_dim": 8, "kv_heads": 1, "window": 5, "qk_norm": True},
    "gated_deltanet": {"conv_size": 4, "expand_v": 2.0, "value_heads": 4},
    "kda": {"conv_size": 4, "expand_v": 2.0, "value_heads": 4},
    "gated_deltanet2": {"conv_size": 4, "expand_v": 2.0, "value_heads": 4},
    "deltanet": {"conv_size": 4},
    "gla": {"expand_v": 0.5, "conv_size": 4},
    "hgrn2": {"conv_size": 4},
    "hgrn": {"conv_size": 4},
    "retnet": {"expand_v": 2.0},
    "mamba2": {"conv_size": 4, "expand_v": 2.0, "value_heads": 4},
    "rwkv6": {"expand_v": 2.0},
    "gated_deltanet_bare": {"mixer": "gated_deltanet"},
    "kda_bare": {"mixer": "kda"},
    "gated_deltanet2_bare": {"mixer": "gated_deltanet2"},
    "deltanet_bare": {"mixer": "deltanet"},
    "gla_bare": {"mixer": "gla"},
    "hgrn2_bare": {"mixer": "hgrn2"},
    "hgrn_bare": {"mixer": "hgrn"},
    "mamba2_one_group": {"mixer": "mamba2", "heads": 1, "conv_size": 1, "expand_v": 0.5, "value_heads": 4},
    "rwkv6_narrow": {"mixer": "rwkv6", "head_dim": 8, "heads": 3},
}
HYBRID = ("gated_deltanet", "hgrn2", "softmax", "hgrn", "hgrn2", "hgrn", "windowed", "gla", "retnet", "deltanet")
HYBRID += ("mamba2", "rwkv6", "kda", "gated_deltanet2")


def design(*kinds: str, **fields: Any) -> Architecture:
    """A stack of width 32 over 50 symbols; each kind is a key of SPECS."""
    layers = [LayerSpec(**{"mixer": kind, "heads": 2, "head_dim": 16} | SPECS[kind]) for kind in kinds]
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 40, "embedding_std": 0.5}
    return Architecture(**sizes | {"initializer_range": 0.2, "layers": tuple(layers)} | fields)


def build(*kinds: str, seed: int = 0, clvr: bool = False, rank: int | None = None, **fields: Any) -> HybridForCausalLM:
    if clvr:
        fields["routing"] = Routing(kind="clvr", rank=rank)
    torch.manual_seed(seed)
    model: HybridForCausalLM = HybridForCausalLM(HybridConfig(architecture=design(*kinds, **fields).canonical()))
    return model.eval()


def wake(model: HybridForCausalLM) -> HybridForCausalLM:
    """Give values to what starts at zero (lower bounds, biases, routing): at zero it could hide an error."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1)
    return model


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_model() -> Callable[..., HybridForCausalLM]:
    return build


@pytest.fixture
def make_awake() -> Callable[..., HybridForCausalLM]:
    """As `make_model`, at weights for which float32 holds 1e-5, with nothing left at zero."""
    return lambda *kinds, **fields: wake(build(*kinds, **{"initializer_range": 0.1} | fields))


@pytest.fixture
def hybrid() -> tuple[str, ...]:
    return HYBRID


@pytest.fixture
def make_design() -> Callable[..., Architecture]:
    return design


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`kinds`: each mixer alone in two layers; each linear one with full attention every three layers; all in one."""
    if "kinds" in metafunc.fixturenames:
        stacks = {kind: (kind, kind) for kind in SPECS}
        stacks |= {f"{kind} 3:1": (kind, kind, "softmax") for kind in linear_mixers() if kind in SPECS}
        stacks["hybrid"] = HYBRID
        metafunc.parametrize("kinds", stacks.values(), ids=stacks)
