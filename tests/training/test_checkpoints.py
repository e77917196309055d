from pathlib import Path
from typing import Any

import pytest
import torch

from nas.training.checkpoints import Checkpoint, CheckpointError, load, save


def state(step: int) -> Checkpoint:
    weights: dict[str, Any] = {"w": torch.full((3,), float(step))}
    return Checkpoint(step, weights, {"w": weights["w"] / 2}, {"adamw": {"state": {0: {"step": torch.tensor(1.0)}}}})


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "deep" / "trial") if request.param == "local" else f"memory://{tmp_path}/trial"


def test_round_trip(folder: str) -> None:
    path = save(state(7), folder)
    assert path == f"{folder}/step-000000007.ckpt"
    found = load(path)
    assert found.step == 7
    assert torch.equal(found.model["w"], torch.full((3,), 7.0))
    assert torch.equal(found.average["w"], torch.full((3,), 3.5))
    assert found.optimizer["adamw"]["state"][0]["step"] == 1


def test_the_last_two_and_the_protected_one_are_kept(folder: str) -> None:
    first, *others = [save(state(step), folder) for step in (1, 2, 3)]
    with pytest.raises(CheckpointError, match="does not exist"):
        load(first)
    assert [load(path).step for path in others] == [2, 3]
    save(state(4), folder, protect=others[0])
    last = save(state(5), folder, protect=others[0])
    assert [load(path).step for path in (others[0], last)] == [2, 5]
    with pytest.raises(CheckpointError, match="does not exist"):
        load(others[1])


def test_writing_leaves_no_other_file(tmp_path: Path) -> None:
    save(state(1), str(tmp_path))
    save(state(1), str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001.ckpt"]


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(state(1), str(tmp_path))
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save(state(1), str(tmp_path))
    assert load(path).step == 1
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("damage", [slice(0, 5), slice(200, 201), slice(-1, None), slice(60, None), slice(0, None)])
def test_damage_is_found_and_named(tmp_path: Path, damage: slice) -> None:
    path = Path(save(state(1), str(tmp_path)))
    data = bytearray(path.read_bytes())
    data[damage] = b"?"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"step-000000001\.ckpt is damaged") as error:
        load(str(path))
    assert "\n" not in str(error.value)
