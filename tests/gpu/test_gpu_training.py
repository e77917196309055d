"""Training on the GPU: a stack of all twelve kinds of layer, and segments for each backbone of hybrid-gpu."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from nas.architecture import Candidate, Routing, derive_seed
from nas.messages import Finished, Measurement, Segment
from nas.training.trainer import run_segment
from search_spaces import load_space
from search_spaces.designs import architecture, recipe
from tests.gpu.conftest import ids
from tests.gpu.measured import Errors
from tests.models.fla_parity import ALL, build, stack, train

pytestmark = pytest.mark.gpu

_FULL = load_space("hybrid-gpu")
SPACE = _FULL.model_copy(update={"proxy": _FULL.proxy.model_copy(update={"layers": 4})})


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_stack_of_all_twelve_kinds_trains(optimizer: str, device: str, errors: Errors) -> None:
    model = build(stack(*ALL, routing=Routing(kind="clvr"))).to(device)
    losses, missing = train(model, optimizer, ids(device, 200), steps=5, narrow=True)
    for step, loss in enumerate(losses):
        errors.note(f"loss {step}", loss)
    assert not missing
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0] - 0.1
    errors.check()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("mixer", SPACE.backbones)
def test_a_segment_trains_and_resumes(mixer: str, optimizer: str, device: str, errors: Errors, tmp_path: Path) -> None:
    """Two rungs of a trial at the preset's widths, four layers deep and few sequences a step."""
    design = architecture(SPACE, mixer, (1,), kv_groups=2)
    settings = recipe(SPACE, optimizer, SPACE.optimizers[optimizer].middle)
    candidate = Candidate(architecture=design, recipe=settings.model_copy(update={"warmup_steps": 2, "batch_size": 8}))
    workload = SPACE.workload.model_copy(update={"evaluation_sequences": 16, "report_every": 3})
    reports: list[Measurement] = []
    checkpoint = None
    for rung, stop in enumerate((6, 12)):
        segment = Segment(
            study="gpu",
            trial=0,
            attempt=rung + 1,
            rung=rung,
            start_step=6 * rung,
            stop_step=stop,
            top=rung == 1,
            candidate=candidate,
            seed=derive_seed(0, 0),
            workload=workload,
            device=device,
            checkpoints=str(tmp_path),
            checkpoint=checkpoint,
        )
        end = run_segment(segment, reports.extend, lambda: False)
        assert isinstance(end, Finished), end
        checkpoint = end.checkpoint
    losses = [m.value for m in reports if m.name == "train_loss"]
    scores = {m.name: m.value for m in end.measurements}
    errors.note("first loss", losses[0])
    errors.note("last loss", losses[-1])
    errors.note("tokens a second", scores["tokens_per_second"])
    errors.note("peak MiB", scores["peak_memory_bytes"] / 2**20)
    assert losses[-1] < losses[0]
    assert all(math.isfinite(m.value) for m in (*reports, *end.measurements))
    errors.check()
