import copy
from typing import Any

import pytest
import torch
from torch import nn

from nas.architecture import Recipe
from nas.training.optimizers import HybridOptimizer, hidden_matrices
from nas.training.schedule import multiplier


class Tiny(nn.Module):
    """One parameter of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.matrix = nn.Linear(4, 6, bias=True)
        self.spared = nn.Linear(6, 4, bias=False)
        self.spared.weight._no_weight_decay = True  # type: ignore[attr-defined]
        self.convolution = nn.Conv1d(4, 4, 3, groups=4, bias=False)
        self.norm = nn.RMSNorm(4)
        self.bounds = nn.Parameter(torch.zeros(2, 4))
        self.lm_head = nn.Linear(4, 7, bias=False)


def recipe(**changes: Any) -> Recipe:
    values = {
        "optimizer": "muon", "lr": 0.01, "scalar_lr": 0.002, "weight_decay": 0.1, "warmup_steps": 10,
        "total_steps": 100, "batch_size": 1, "sequence_length": 1,
    }  # fmt: skip
    return Recipe.model_validate(values | changes)


def described(model: nn.Module, optimizer: HybridOptimizer) -> dict[str, tuple[str, float, float]]:
    """(optimiser, learning rate, decay) by parameter name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: (name, group["lr"], group["weight_decay"])
        for name, groups in optimizer.groups.items()
        for group in groups
        for parameter in group["params"]
    }


def test_muon_gets_the_hidden_matrices_only() -> None:
    model = Tiny()
    assert described(model, HybridOptimizer(model, recipe(), model.lm_head)) == {
        "matrix.weight": ("muon", 0.01, 0.1),
        "spared.weight": ("muon", 0.01, 0.0),
        "embedding.weight": ("adamw", 0.002, 0.0),
        "matrix.bias": ("adamw", 0.002, 0.0),
        "convolution.weight": ("adamw", 0.002, 0.1),
        "norm.weight": ("adamw", 0.002, 0.0),
        "bounds": ("adamw", 0.002, 0.1),
        "lm_head.weight": ("adamw", 0.002, 0.1),
    }


def test_adamw_takes_everything_at_the_same_rates() -> None:
    model = Tiny()
    found = described(model, HybridOptimizer(model, recipe(optimizer="adamw", scalar_lr=None), model.lm_head))
    assert set(found) == {name for name, _ in model.named_parameters()}
    assert {name for name, (kind, lr, _) in found.items() if (kind, lr) == ("adamw", 0.01)} == set(found)


def test_a_tied_head_is_an_embedding() -> None:
    model = Tiny()
    model.lm_head.weight = model.embedding.weight
    assert [p.shape for p in hidden_matrices(model, None)] == [(6, 4), (4, 6)]


def gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_state_resumes_exactly(optimizer: str) -> None:
    straight, resumed = Tiny(), Tiny()
    one, two = (HybridOptimizer(model, recipe(optimizer=optimizer), model.lm_head) for model in (straight, resumed))
    for seed in range(3):
        gradients(straight, seed)
        one.step()
    resumed.load_state_dict(straight.state_dict())
    two.load_state_dict(copy.deepcopy(one.state_dict()))  # as read from a file: nothing shared
    for model, own in ((straight, one), (resumed, two)):
        gradients(model, 9)
        own.step()
    for name, parameter in straight.named_parameters():
        assert torch.equal(parameter, resumed.get_parameter(name)), name


def test_rates_and_decay_are_the_recipes_never_the_states() -> None:
    model = Tiny()
    stored = HybridOptimizer(model, recipe(), model.lm_head)
    stored.set_lr(0.1)
    other = HybridOptimizer(model, recipe(lr=0.5, weight_decay=0.3), model.lm_head)
    other.load_state_dict(stored.state_dict())
    assert described(model, other)["matrix.weight"] == ("muon", 0.5, 0.3)
    assert described(model, other)["norm.weight"] == ("adamw", 0.002, 0.0)


def test_set_lr_scales_the_recipes_rates() -> None:
    model = Tiny()
    optimizer = HybridOptimizer(model, recipe(), model.lm_head)
    for scale in (0.5, 0.25):
        optimizer.set_lr(scale)
        found = described(model, optimizer)
        assert found["matrix.weight"][1] == pytest.approx(0.01 * scale)
        assert found["norm.weight"][1] == pytest.approx(0.002 * scale)


def test_zero_grad_clears_all() -> None:
    model = Tiny()
    gradients(model, 0)
    HybridOptimizer(model, recipe(), model.lm_head).zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 0.1), (4, 0.5), (9, 1.0), (50, 1.0), (80, 1.0), (85, 0.5), (99, 1 - (19 / 20) ** 0.5), (100, 0.0), (120, 0.0)],
)
def test_schedule_warms_up_holds_and_decays(step: int, expected: float) -> None:
    assert multiplier(step, recipe()) == pytest.approx(expected)


def test_schedule_without_warm_up_or_decay() -> None:
    flat = recipe(warmup_steps=0, decay_fraction=0.0)
    assert {multiplier(step, flat) for step in range(100)} == {1.0}
    assert multiplier(5, recipe(warmup_steps=100, decay_fraction=1.0)) == pytest.approx(0.06)
