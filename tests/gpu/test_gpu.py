"""On a GPU (`pytest -m gpu`): Triton kernels against our CPU kernels, and training of every backbone."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest

from nas.architecture import Candidate, derive_seed
from nas.messages import Finished, Measurement, Segment
from nas.registry import linear_mixers
from search_spaces import load_space
from search_spaces.designs import architecture, recipe

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

SPACE = load_space("hybrid-gpu")


@pytest.mark.parametrize("backbone", linear_mixers())
def test_the_same_weights_give_the_same_logits_on_cpu_and_gpu(backbone: str) -> None:
    """The CPU kernels against fla's Triton kernels in one process; bf16 on the GPU, float32 on the CPU."""
    from nas.models.configuration import HybridConfig
    from nas.models.modeling import HybridForCausalLM

    torch.manual_seed(0)
    design = architecture(SPACE, backbone, (2, 5, 8, 11))
    cpu = HybridForCausalLM(HybridConfig(architecture=design.canonical())).eval()
    gpu = copy.deepcopy(cpu).cuda()
    ids = torch.randint(SPACE.workload.vocab_size, (2, 192), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = cpu(ids).logits
        with torch.autocast("cuda", torch.bfloat16):
            found = gpu(ids.cuda()).logits.float().cpu()
    error = (found - expected).norm() / expected.norm()
    print(f"{backbone}: relative error of the logits {error:.2e}")
    assert error < 5e-2


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("backbone", linear_mixers())
def test_a_segment_trains_and_resumes(backbone: str, optimizer: str, tmp_path: Path) -> None:
    from nas.training.trainer import run_segment

    design = architecture(SPACE, backbone, (5, 11), kv_groups=2)
    candidate = Candidate(architecture=design, recipe=recipe(SPACE, optimizer, SPACE.optimizers[optimizer].middle))
    workload = SPACE.workload.model_copy(update={"evaluation_sequences": 64})
    reports: list[Measurement] = []
    checkpoint = None
    for rung, stop in enumerate((20, 40)):
        segment = Segment(
            study="gpu",
            trial=0,
            attempt=rung + 1,
            rung=rung,
            start_step=20 * rung,
            stop_step=stop,
            top=rung == 1,
            candidate=candidate,
            seed=derive_seed(0, 0),
            workload=workload,
            device="cuda",
            checkpoints=str(tmp_path),
            checkpoint=checkpoint,
        )
        end = run_segment(segment, reports.extend, lambda: False)
        assert isinstance(end, Finished), end
        checkpoint = end.checkpoint
    losses = [m.value for m in reports if m.name == "train_loss"]
    assert losses[-1] < losses[0]
    assert all(math.isfinite(m.value) for m in (*reports, *end.measurements))
    scores = {m.name: m.value for m in end.measurements}
    speed, peak = scores["tokens_per_second"], scores["peak_memory_bytes"] / 2**20
    print(f"{backbone} {optimizer}: {speed:.0f} tokens/s, {peak:.0f} MiB")
