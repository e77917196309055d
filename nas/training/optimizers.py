"""AdamW and Muon over one model as one object, with decay groups (Recipe)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nas.architecture import Recipe

MUON_MOMENTUM = 0.95


def hidden_matrices(model: nn.Module, head: nn.Module | None) -> list[nn.Parameter]:
    """Weights of the linear maps between embedding and head, each once: what Muon updates.

    Tables such as HGRN's lower bounds are 2-D too but no linear map; a tied head is the embedding.
    """
    apart = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    linear = {module.weight for module in model.modules() if isinstance(module, nn.Linear) and module is not head}
    return [parameter for parameter in model.parameters() if parameter in linear - apart]


class HybridOptimizer:
    """Muon or AdamW for the hidden matrices at `lr`, AdamW for everything else at `scalar_lr` (`lr` unless set).

    Weight decay is decoupled; vectors, embeddings and parameters marked `_no_weight_decay` have none. Muon (Jordan et
    al., 2024) runs with Nesterov momentum .95 and its update scaled to AdamW's size, .2 sqrt(max(rows, columns))
    (Liu et al., arXiv:2502.16982). Its best learning rates are still a few times AdamW's: a space gives both ranges.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, head: nn.Module | None = None) -> None:
        matrices = hidden_matrices(model, head)
        hidden = set(matrices)
        embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
        others = [parameter for parameter in model.parameters() if parameter not in hidden]
        scalar_lr = recipe.scalar_lr or recipe.lr

        def group(parameters: list[nn.Parameter], lr: float, decay: bool) -> dict[str, Any]:
            kept = [p for p in parameters if decay == (p.ndim > 1 and p not in embeddings and not _spared(p))]
            return {"params": kept, "lr": lr, "weight_decay": recipe.weight_decay if decay else 0.0}

        by_matrices = [group(matrices, recipe.lr, decay) for decay in (True, False)]
        by_others = [group(others, scalar_lr, decay) for decay in (True, False)]
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        if recipe.optimizer == "muon" and matrices:
            self._optimizers["muon"] = torch.optim.Muon(
                _filled(by_matrices), momentum=MUON_MOMENTUM, nesterov=True, adjust_lr_fn="match_rms_adamw"
            )
            by_matrices = []
        self._optimizers["adamw"] = torch.optim.AdamW(
            _filled(by_matrices + by_others), betas=recipe.betas, eps=1e-8, fused=True
        )
        self._base = {
            name: [float(group["lr"]) for group in optimizer.param_groups]
            for name, optimizer in self._optimizers.items()
        }

    @property
    def groups(self) -> dict[str, list[dict[str, Any]]]:
        """The parameter groups by optimiser, as torch keeps them."""
        return {name: optimizer.param_groups for name, optimizer in self._optimizers.items()}

    def set_lr(self, scale: float) -> None:
        """Sets every learning rate to `scale` times the recipe's."""
        for name, optimizer in self._optimizers.items():
            for group, base in zip(optimizer.param_groups, self._base[name], strict=True):
                group["lr"] = base * scale

    def step(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {name: optimizer.state_dict() for name, optimizer in self._optimizers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores moments; learning rates and decay stay the recipe's, never those of the state."""
        for name, optimizer in self._optimizers.items():
            current = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state[name]["state"], "param_groups": current})


def _spared(parameter: nn.Parameter) -> bool:
    return bool(getattr(parameter, "_no_weight_decay", False))


def _filled(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [group for group in groups if group["params"]]
