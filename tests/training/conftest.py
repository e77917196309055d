"""Small segments for the training room: a text folder, a two-layer proxy, a short schedule."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nas.architecture import Architecture, Candidate, LayerSpec, Recipe
from nas.messages import Segment
from nas.tasks import MQAR
from nas.workload import Text, Workload

SOFTMAX = LayerSpec(mixer="softmax", heads=2, head_dim=16)
GDN = LayerSpec(mixer="gated_deltanet", heads=2, head_dim=16, conv_size=4)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty small files of different text."""
    folder = tmp_path_factory.mktemp("text")
    for index in range(40):
        (folder / f"{index:02}.txt").write_text(f"file {index} " + f"the number {index} is said again. " * 30)
    return folder


@pytest.fixture
def workload(text_folder: Path) -> Workload:
    return Workload(
        text=Text(weight=0.25, source=str(text_folder), holdout=0.2),
        recall=(MQAR(keys=8, values=8, pairs=(2, 4), evaluation_pairs=(3, 4)),),
        evaluation_sequences=16,
        report_every=2,
    )


@pytest.fixture
def make_segment(workload: Workload, tmp_path: Path) -> Callable[..., Segment]:
    """A segment of 12 steps on a CPU; keywords replace fields of the recipe or of the segment."""

    def make(layers: tuple[LayerSpec, ...] = (GDN, SOFTMAX), **changes: Any) -> Segment:
        recipe = {
            "optimizer": "adamw", "lr": 3e-3, "warmup_steps": 2, "total_steps": 12, "batch_size": 10,
            "sequence_length": 32, "weight_decay": 0.1,
        }  # fmt: skip
        segment = {
            "study": "study", "trial": 3, "attempt": 1, "rung": 0, "start_step": 0, "stop_step": 12, "top": True,
            "seed": 5, "device": "cpu", "checkpoints": str(tmp_path / "checkpoints"), "checkpoint": None,
        }  # fmt: skip
        for name, value in changes.items():
            (recipe if name in Recipe.model_fields else segment)[name] = value
        architecture = Architecture(
            vocab_size=workload.vocab_size, hidden_size=32, intermediate_size=48, layers=layers, embedding_std=0.125
        )
        candidate = Candidate(architecture=architecture, recipe=Recipe.model_validate(recipe))
        return Segment.model_validate({**segment, "candidate": candidate, "workload": workload})

    return make
