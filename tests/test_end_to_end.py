"""The whole way for real: `nas launch` with Ray, torch and text, killed half-way, resumed, exported and loaded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nas.export import ExportError, export_trials
from nas.store import Store
from search_spaces.loading import read_text

LOAD = """
import json, sys, warnings
class Refuse:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("nas", "search_spaces", "workers"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
warnings.simplefilter("ignore")
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = tokenizer("def f(x): <|r3|><|r20|>", return_tensors="pt").input_ids
text = tokenizer.decode(model.generate(ids, max_new_tokens=3, do_sample=False)[0])
print(json.dumps({"ids": ids.tolist(), "logits": model(ids).logits[0, -1].tolist(), "text": text}))
"""


def space(folder: Path) -> Path:
    """cpu-demo in miniature: 2 backbones, 3 rungs of a few steps."""
    text = read_text("cpu-demo")
    for old, new in (
        ("[gated_deltanet, deltanet, gla, retnet]", "[gated_deltanet, retnet]"),
        ("steps: [100, 200, 300]", "steps: [4, 8, 12]"),
        ("pairs: [4, 8, 12]", "pairs: [2]"),
        ("evaluation_pairs: [8, 12, 16]}", "evaluation_pairs: [2]}\n  evaluation_sequences: 16\n  report_every: 2"),
        ("batch_size: 40", "batch_size: 10\n  warmup_steps: 2"),
    ):
        assert old in text
        text = text.replace(old, new)
    path = folder / "mini.yaml"
    path.write_text(text)
    return path


def nas(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nas", *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=110
    )


def trials(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(nas(folder, "trials", "mini", "--json").stdout)
    return found


def kill_half_way(folder: Path, arguments: list[str]) -> None:
    """Starts a launch in its own session and SIGKILLs the driver once some segments are done."""
    with (folder / "first.log").open("w") as log:
        driver = subprocess.Popen(
            [sys.executable, "-m", "nas", *arguments], cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
        deadline = time.monotonic() + 100
        while (folder / "first.log").read_text().count(" at step ") < 3:
            assert driver.poll() is None, (folder / "first.log").read_text()
            assert time.monotonic() < deadline, (folder / "first.log").read_text()
            time.sleep(0.1)
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()


@pytest.mark.timeout(300)
def test_launch_kill_resume_export_load(tmp_path: Path) -> None:
    arguments = ["launch", "--space", str(space(tmp_path)), "--study", "mini", "--trials", "6", "--workers", "2"]
    kill_half_way(tmp_path, arguments)
    before = {t["trial"]: t for t in trials(tmp_path)}
    done = nas(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    after = trials(tmp_path)

    assert [t["trial"] for t in after] == list(range(6))
    assert len({t["candidate_digest"] for t in after}) == 6
    assert {t["state"] for t in after} <= {"complete", "pruned"}
    for number, old in before.items():
        assert after[number]["candidate_digest"] == old["candidate_digest"]
        assert after[number]["step"] >= old["step"]
    with Store.open(f"sqlite:///{tmp_path}/nas.db", read_only=True) as store:
        info = store.study("mini")
        for row in store.trials(info.id):
            rungs = [m.step for m in store.measurements(info.id, row.number, ["recall_nll"]) if m.step in (4, 8, 12)]
            assert rungs == [4, 8, 12][: row.rung + 1]
        best = next(t["trial"] for t in after if t["state"] == "complete")
        [folder] = export_trials(store, "mini", [best], tmp_path / "out")
        loaded = subprocess.run(
            [sys.executable, "-P", "-c", LOAD, str(folder)],
            env=os.environ | {"HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": ""},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert loaded.returncode == 0, loaded.stderr[-2000:]
        answer = json.loads(loaded.stdout)
        _same_logits(store, best, answer)
        _cards(folder, best)
        _refusals(store, tmp_path, best)


def _same_logits(store: Store, number: int, answer: dict[str, Any]) -> None:
    import torch

    from nas.export.hub import load_model

    ids = torch.tensor(answer["ids"])
    assert ids[0].tolist() == [*b"def f(x): ", 256 + 3, 256 + 20]
    expected = load_model(store.trial(store.study("mini").id, number))(ids).logits[0, -1]
    assert answer["logits"] == expected.tolist()
    assert answer["text"].startswith("def f(x): <|r3|><|r20|>")


def _cards(folder: Path, number: int) -> None:
    card = (folder / "README.md").read_text()
    assert f"nas export mini/{number}" in card
    assert "Softmax attention" in card or "RetNet" in card or "Gated DeltaNet" in card
    details = json.loads((folder / "nas.json").read_text())
    assert details["trial"]["trial"] == number
    assert details["candidate"]["recipe"]["total_steps"] == 12


def _refusals(store: Store, folder: Path, number: int) -> None:
    export_trials(store, "mini", [number], folder / "out")  # an earlier export of ours is replaced
    (folder / "taken" / f"mini-{number}").mkdir(parents=True)
    with pytest.raises(ExportError, match="exists and is no export of ours"):
        export_trials(store, "mini", [number], folder / "taken")
    checkpoint = Path(str(store.trial(store.study("mini").id, number).checkpoint))
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1] + b"?")
    with pytest.raises(ExportError, match="SHA-256"):
        export_trials(store, "mini", [number], folder / "other")
    assert not (folder / "other" / f"mini-{number}").exists()
