import math

import pytest
import torch
from torch import Tensor

from nas.tasks import MQAR, tasks
from nas.training.data.mix import Mix
from nas.training.data.recall import GENERATORS
from nas.training.data.recall.mqar import FILLER, IGNORED, generate
from nas.training.data.sample import sample_text
from nas.workload import BYTES, Workload

SPEC = MQAR(keys=16, values=12)


def make(size: int, sequences: int = 64, length: int = 64, seed: int = 0, repeat: bool = True) -> tuple[Tensor, Tensor]:
    return generate(SPEC, size, sequences, length, torch.Generator().manual_seed(seed), repeat)


@pytest.mark.parametrize(("size", "length"), [(1, 4), (2, 64), (5, 64), (13, 64), (16, 64), (16, 65)])
@pytest.mark.parametrize("repeat", [True, False])
def test_every_label_is_the_value_shown_with_its_key(size: int, length: int, repeat: bool) -> None:
    input_ids, labels = make(size, length=length, repeat=repeat)
    for ids, targets in zip(input_ids.tolist(), labels.tolist(), strict=True):
        shown = dict(zip(ids[0 : 2 * size : 2], ids[1 : 2 * size : 2], strict=True))
        assert len(shown) == size
        assert all(BYTES <= key < BYTES + 16 for key in shown)
        assert all(BYTES + 16 <= value < BYTES + 28 for value in shown.values())
        asked = [position for position, target in enumerate(targets) if target != IGNORED]
        assert len(asked) == (length // 2 - size if repeat else size)
        for start in range(0, len(asked), size):
            part = asked[start : start + size]
            assert len({ids[position] for position in part}) == len(part)  # each key once a round
        for position in asked:
            assert targets[position] == ids[position + 1] == shown[ids[position]]
        used = {*range(2 * size), *asked, *(position + 1 for position in asked)}
        assert all(token == FILLER for position, token in enumerate(ids) if position not in used)


def test_answers_cannot_be_guessed_without_the_context() -> None:
    """Uniform, independent of the key asked and of the answers before: nothing beats 1 / values."""
    input_ids, labels = make(4, sequences=20_000, length=16)
    answers = labels[labels != IGNORED].view(-1, 4) - BYTES - 16
    keys = input_ids[labels != IGNORED].view(-1, 4) - BYTES
    sd = math.sqrt(1 / 12 * 11 / 12 / 20_000)
    for column in range(4):
        share = torch.bincount(answers[:, column], minlength=12) / len(answers)
        assert (share - 1 / 12).abs().max() < 5 * sd
    assert abs((answers[:, 0] == answers[:, 1]).double().mean() - 1 / 12) < 5 * sd
    by_key = torch.bincount(keys.flatten() * 12 + answers.flatten(), minlength=16 * 12).view(16, 12).double()
    assert (by_key / by_key.sum(1, keepdim=True) - 1 / 12).abs().max() < 5 * math.sqrt(1 / 12 * 11 / 12 / 5_000)


def test_every_round_asks_in_a_new_order() -> None:
    input_ids, _ = make(8, length=64, repeat=True)
    rounds = input_ids[:, 16::2].view(64, 3, 8)
    assert (rounds[:, 0] != rounds[:, 1]).any(dim=1).all()
    assert (rounds[:, 0] != input_ids[:, 0:16:2]).any(dim=1).all()


def test_a_pure_function_of_the_seed() -> None:
    assert torch.equal(make(5, seed=1)[0], make(5, seed=1)[0])
    assert not torch.equal(make(5, seed=1)[0], make(5, seed=2)[0])


def test_too_short_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence_length=51 is too short for 13 pairs; needs at least 52"):
        make(13, length=51)


def test_every_task_has_a_generator() -> None:
    assert set(GENERATORS) == set(tasks())


def test_batches_are_functions_of_seed_and_step(workload: Workload) -> None:
    first, same, other = Mix(workload, 10, 32, seed=1), Mix(workload, 10, 32, seed=1), Mix(workload, 10, 32, seed=2)
    for step in (0, 7):
        assert torch.equal(first.batch(step).input_ids, same.batch(step).input_ids)
        assert torch.equal(first.batch(step).labels, same.batch(step).labels)
        for row in range(10):
            assert not torch.equal(first.batch(step).input_ids[row], other.batch(step).input_ids[row])
            assert not torch.equal(first.batch(step).input_ids[row], first.batch(step + 1).input_ids[row])


def test_a_batch_follows_the_weights(workload: Workload) -> None:
    batch = Mix(workload, 10, 32, seed=1).batch(0)
    labelled = batch.labels != IGNORED
    assert batch.input_ids.shape == batch.labels.shape == batch.weights.shape == (10, 32)
    assert labelled[:2].all()  # two text windows, each predicting its own next bytes
    assert torch.equal(batch.input_ids[:2, 1:], batch.labels[:2, :-1])
    assert batch.weights[~labelled].sum() == 0
    assert batch.weights[:2].sum().item() == pytest.approx(0.2)
    assert batch.weights[2:].sum().item() == pytest.approx(0.8)


def test_sizes_take_turns() -> None:
    workload = Workload.model_validate({"text": {"weight": 0}, "recall": [{"pairs": [1, 2, 5]}]})
    mix = Mix(workload, 4, 32, seed=0)
    pairs = torch.cat([(mix.batch(step).labels != IGNORED).sum(1) for step in range(3)])
    assert torch.bincount(pairs).tolist() == [0] * 11 + [4, 0, 0, 4, 4]


def test_evaluation_is_fixed_and_apart_from_training(workload: Workload) -> None:
    task = workload.recall[0]
    one, two = (Mix(workload, 10, 32, seed=seed).recall_evaluation(task, 4, 50)[0] for seed in (1, 2))
    assert torch.equal(one, two)
    trained = torch.cat([Mix(workload, 10, 32, seed=1).batch(step).input_ids[2:] for step in range(20)])
    assert not (trained[:, None] == one[None]).all(dim=2).any()


def test_samples_say_what_is_asked_and_by_chance(workload: Workload) -> None:
    sample = sample_text("mqar", workload, seed=0)
    assert "chance: 1 of 8 answers = 0.1250" in sample
    shown = dict(pair.split(" -> ") for pair in sample.split("shown: ")[1].splitlines()[0].split(", "))
    asked = dict(pair.split(" -> ") for pair in sample.split("asked: ")[1].splitlines()[0].split(", "))
    assert asked == {key: f"[{value}]" for key, value in shown.items()}
    assert "said again" in sample_text("text", workload, seed=0)
    with pytest.raises(ValueError, match="data 'mqra' is unknown; did you mean 'mqar'"):
        sample_text("mqra", workload, seed=0)
