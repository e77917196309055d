import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from nas.messages import Failed, Failure, Finished, Measurement, Segment
from nas.training import checkpoints, trainer
from nas.training.averaging import Average, decay
from nas.training.trainer import run_segment
from tests.training.conftest import GDN, SOFTMAX

Make = Callable[..., Segment]


def finish(segment: Segment) -> tuple[Finished, list[Measurement]]:
    reported: list[Measurement] = []
    result = run_segment(segment, reported.extend)
    assert isinstance(result, Finished), result
    return result, reported


def scores(result: Finished) -> dict[str, float]:
    return {measurement.name: measurement.value for measurement in result.measurements}


def same(one: object, two: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and torch.equal(one, two)
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    return one == two


def test_a_segment_reports_and_scores(make_segment: Make) -> None:
    result, reported = finish(make_segment())
    assert (result.trial, result.attempt, result.step) == (3, 1, 12)
    assert result.seconds > 0
    found = scores(result)
    assert set(found) == {
        "recall", "recall/mqar/3", "recall/mqar/4", "recall_nll", "loss", "bits_per_byte", "tokens_per_second",
        "peak_memory_bytes",
    }  # fmt: skip
    assert found["recall"] == pytest.approx((found["recall/mqar/3"] + found["recall/mqar/4"]) / 2)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))
    assert {m.step for m in result.measurements} == {12}
    assert [m.step for m in reported if m.name == "train_loss"] == [2, 4, 6, 8, 10, 12]
    assert [m.step for m in reported if m.name == "recall"] == [2, 4, 6, 8, 10]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_segment_ends_bit_by_bit_where_a_straight_one_does(make_segment: Make, optimizer: str) -> None:
    straight, _ = finish(make_segment(optimizer=optimizer))
    expected = checkpoints.load(straight.checkpoint)
    half, _ = finish(make_segment(optimizer=optimizer, stop_step=5, top=False))
    again = make_segment(optimizer=optimizer, start_step=5, checkpoint=half.checkpoint, rung=1, attempt=2)
    resumed, _ = finish(again)
    found = checkpoints.load(resumed.checkpoint)
    for part in ("model", "average", "optimizer"):
        assert same(getattr(expected, part), getattr(found, part)), part
    ours, theirs = scores(resumed), scores(straight)
    assert {name: ours[name] for name in ("recall", "recall_nll", "loss")} == {
        name: theirs[name] for name in ("recall", "recall_nll", "loss")
    }


def test_lower_rungs_score_the_average_and_the_top_rung_the_weights(
    make_segment: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[nn.Module] = []

    def recall_scores(model: nn.Module, *_: object) -> dict[str, float]:
        assert not model.training
        scored.append(model)
        return {"recall": 0.0}

    monkeypatch.setattr(trainer, "recall_scores", recall_scores)
    for top, part in ((False, "average"), (True, "model")):
        result, _ = finish(make_segment(top=top, stop_step=4))
        state = checkpoints.load(result.checkpoint)
        assert same(dict(scored[-1].state_dict()), getattr(state, part))
        assert not same(state.model, state.average)


def test_the_average_follows_the_weights() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    average = Average(model)
    nn.init.ones_(model.weight)
    average.update(0.75)
    assert torch.equal(average.model.state_dict()["weight"], torch.full((1, 2), 0.25))
    assert decay(0, 300) == pytest.approx(0.1)
    assert decay(299, 300) == pytest.approx(0.9)
    assert decay(10_000, 3_000) == pytest.approx(0.99)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_divergence_fails_and_nothing_non_finite_is_reported(make_segment: Make, optimizer: str) -> None:
    reported: list[Measurement] = []
    segment = make_segment(optimizer=optimizer, lr=1e6, warmup_steps=0)
    result = run_segment(segment, reported.extend)
    assert isinstance(result, Failed)
    assert result.kind is Failure.DIVERGED
    assert "at step" in result.message
    assert reported
    assert all(math.isfinite(measurement.value) for measurement in reported)
    assert not Path(segment.checkpoints).exists()


@pytest.mark.parametrize(
    ("error", "kind"), [(torch.OutOfMemoryError("CUDA\nout of memory"), Failure.OOM), (KeyError("x"), Failure.ERROR)]
)
def test_errors_become_one_line_and_a_traceback(
    make_segment: Make, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: Failure
) -> None:
    def batch_loss(*_: object) -> None:
        raise error

    monkeypatch.setattr(trainer, "batch_loss", batch_loss)
    result = run_segment(make_segment(), lambda _: None)
    assert isinstance(result, Failed)
    assert result.kind is kind
    assert "\n" not in result.message
    assert "batch_loss" in result.traceback


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupts_pass_through(make_segment: Make, error: type[BaseException]) -> None:
    def report(_: object) -> None:
        raise error

    with pytest.raises(error):
        run_segment(make_segment(), report)


def test_a_stopped_segment_is_paused_with_a_checkpoint(make_segment: Make) -> None:
    answers = iter([False] * 3 + [True])
    result = run_segment(make_segment(), lambda _: None, lambda: next(answers))
    assert isinstance(result, Finished)
    assert result.step == 3
    assert result.measurements == ()
    assert checkpoints.load(result.checkpoint).step == 3


def test_bad_checkpoints_are_errors(make_segment: Make, tmp_path: Path) -> None:
    path = tmp_path / "step-000000005.ckpt"
    path.write_bytes(b"nothing")
    result = run_segment(make_segment(start_step=5, checkpoint=str(path)), lambda _: None)
    assert isinstance(result, Failed)
    assert result.kind is Failure.CHECKPOINT
    assert "is damaged" in result.message
    result = run_segment(make_segment(start_step=5), lambda _: None)
    assert isinstance(result, Failed)
    assert "start_step=5 but checkpoint=None is of 0" in result.message


def test_a_small_hybrid_learns(make_segment: Make) -> None:
    segment = make_segment(layers=(GDN, SOFTMAX, GDN), total_steps=60, stop_step=60, lr=5e-3, warmup_steps=10)
    result, reported = finish(segment)
    losses = [m.value for m in reported if m.name == "train_loss"]
    assert losses[0] > 5
    assert losses[-1] < 3.2
    assert scores(result)["recall_nll"] < math.log(8) + 0.1
    assert scores(result)["loss"] < 3.5
