"""The example of CONTRIBUTING.md: another package's mixer and task, installed, searched, exported and loaded."""

import json
import os
import sqlite3
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[1]
SPACE = """
name: plugin
trials: 2
backbones: [leaky_average]
ratios: [pure, "2:1"]
optimizers: {adamw: {lr: {low: 1.0e-3, high: 4.0e-3}}}
proxy:
  {layers: 2, hidden_size: 32, intermediate_size: 64, heads: 2, head_dim: 16, sequence_length: 48, batch_size: 8,
  warmup_steps: 2}
workload:
  text: {weight: 0}
  recall:
    - {task: overwrite, keys: 8, values: 8, pairs: [2, 3], evaluation_pairs: [3, 4]}
    - {task: mqar, keys: 8, values: 8, pairs: [2], evaluation_pairs: [3]}
  evaluation_sequences: 16
rungs: {steps: [3]}
"""
MODEL = """
import json, torch
from nas.architecture import Architecture, LayerSpec
from nas.cost import cost
from nas.models.configuration import HybridConfig
from nas.models.modeling import HybridForCausalLM
layer = LayerSpec(mixer="leaky_average", heads=2, head_dim=8)
design = Architecture(vocab_size=50, hidden_size=16, intermediate_size=24, layers=(layer, layer), initializer_range=0.3)
model = HybridForCausalLM(HybridConfig(architecture=design.canonical())).eval()
price = cost(design, 30, "float32")
ids = torch.randint(50, (1, 30))
with torch.no_grad():
    whole, cache, pieces = model(ids).logits, None, []
    for part in ids.split([20, 1, 9], 1):
        out = model(part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        pieces.append(out.logits)
held = sum(state["recurrent_state"].numel() * 4 for state in cache)
print(json.dumps({"error": float((torch.cat(pieces, 1) - whole).abs().max() / whole.abs().max()),
    "parameters": [sum(p.numel() for p in model.parameters()), price.parameters],
    "bytes": [held, price.kv_cache_bytes]}))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The example's wheel, unpacked where Python finds it, as pip would."""
    folder = tmp_path_factory.mktemp("plugin")
    (wheel,) = WheelBuilder(str(ROOT / "examples" / "plugin")).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return os.environ | {"PYTHONPATH": f"{folder / 'site'}{os.pathsep}{ROOT}", "NO_COLOR": "1", "COLUMNS": "200"}


def run(environment: dict[str, str], folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def test_its_mixer_costs_what_it_keeps_and_decodes(environment: dict[str, str], tmp_path: Path) -> None:
    found = json.loads(run(environment, tmp_path, "-c", MODEL).splitlines()[-1])
    assert found["error"] < 1e-5
    assert found["parameters"][0] == found["parameters"][1]
    assert found["bytes"][0] == found["bytes"][1]


def test_its_task_says_what_it_asks(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "plugin.yaml").write_text(SPACE)
    sample = run(environment, tmp_path, "-m", "nas", "data", "show", "overwrite", "--space", "plugin.yaml")
    shown = dict(pair.split(" -> ") for pair in sample.split("shown: ")[1].splitlines()[0].split(", "))  # the last wins
    asked = dict(pair.split(" -> ") for pair in sample.split("asked: ")[1].splitlines()[0].split(", "))
    assert len(asked) == 3
    assert {key: f"[{value}]" for key, value in shown.items()} == asked


def test_its_task_names_what_does_not_fit(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "plugin.yaml").write_text(
        SPACE.replace("keys: 8, values: 8, pairs: [2, 3]", "keys: 3, values: 8, pairs: [4]")
    )
    done = subprocess.run(
        [sys.executable, "-m", "nas", "spaces", "check", "plugin.yaml"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "workload.recall.0: pairs=4 needs as many different keys; keys=3" in done.stderr


def installed(folder: Path, name: str, entries: str, code: str) -> dict[str, str]:
    """A package of one module in a folder of its own, with its entry points."""
    info = folder / f"{name}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(entries)
    (folder / f"{name}.py").write_text(code)
    return os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "NO_COLOR": "1"}


def test_a_broken_package_is_named_and_left_out(tmp_path: Path) -> None:
    entries = "[nas.mixers]\nbad = broken:MIXER\n[nas.tasks]\nworse = broken:Task\nworst = leaving:Task\n"
    environment = installed(tmp_path / "site", "broken", entries, "import a_module_that_is_not_there\n")
    (tmp_path / "site" / "leaving.py").write_text("raise SystemExit(3)\n")
    command = [sys.executable, "-m", "nas", "cost", "cpu-demo", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert json.loads(done.stdout)
    lines = sorted(done.stderr.strip().splitlines())
    assert len(lines) == 3
    assert "entry point nas.mixers:bad of broken cannot be loaded and is left out: ModuleNotFoundError" in lines[0]
    assert "entry point nas.tasks:worse of broken" in lines[1] + lines[2]
    assert "nas.tasks:worst of broken cannot be loaded and is left out: SystemExit: 3" in lines[1] + lines[2]


def test_a_task_without_its_members_is_left_out_by_name(tmp_path: Path) -> None:
    code = "from typing import Literal\nfrom nas.tasks import RecallTask\n"
    code += "class T(RecallTask):\n    task: Literal['t'] = 't'\n"
    environment = installed(tmp_path / "site", "partial", "[nas.tasks]\nt = partial:T\n", code)
    command = [sys.executable, "-c", "from nas.tasks import tasks; print(*tasks())"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["mqar"]
    expected = "entry point nas.tasks:t of partial lacks answers, min_length, special_tokens; it is left out"
    assert done.stderr.strip() == expected


@pytest.mark.parametrize(
    ("name", "flags", "problem"),
    [
        ("other", "", "entry point nas.mixers:other of half gives the mixer 'mine'"),
        ("a+b", "", "entry point nas.mixers:a+b of half: allowed names have a-z, 0-9 and _"),
        ("unbuilt", "", "nothing builds it; its package must give nas.mixer_builders:unbuilt"),
        ("mine", ", delta_rule=True", "mixer 'mine': register(..., delta_rule=False) contradicts its entry"),
        ("mine", ", routable=False", "mixer 'mine': register(..., linear=True) contradicts its entry"),
    ],
)
def test_halves_that_disagree_are_refused(name: str, flags: str, problem: str, tmp_path: Path) -> None:
    entries = f"[nas.mixers]\n{name} = half:MIXER\n[nas.mixer_builders]\nmine = half:register\n"
    mixer = "mine" if name == "other" else name
    code = f"""
from nas.registry import Mixer
MIXER = Mixer(name="{mixer}", title="", family="linear", update_rule="", source="", parameters=lambda x: 0{flags})
def register(add):
    add("mine", lambda *_: None)
"""
    environment = installed(tmp_path / "site", "half", entries, code)
    check = "from nas.training.trainer import check_halves; check_halves('mine')"
    done = subprocess.run([sys.executable, "-c", check], env=environment, capture_output=True, text=True, check=False)
    assert problem in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_search_trains_both_and_an_export_loads(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "plugin.yaml").write_text(SPACE)
    run(environment, tmp_path, "-m", "nas", "launch", "--space", "plugin.yaml", "--workers", "1")
    trials = json.loads(run(environment, tmp_path, "-m", "nas", "trials", "plugin", "--json"))
    ours = [trial for trial in trials if trial["backbones"] == ["leaky_average"] and trial["state"] == "complete"]
    assert ours
    assert all(0 <= trial["recall"] <= 1 for trial in ours)
    with sqlite3.connect(tmp_path / "nas.db") as database:
        measured = {name for (name,) in database.execute("SELECT DISTINCT name FROM nas_measurements")}
    assert {"recall/overwrite/3", "recall/overwrite/4", "recall/mqar/3"} <= measured
    run(environment, tmp_path, "-m", "nas", "export", f"plugin/{ours[0]['trial']}", "--out", "out")
    (folder,) = (tmp_path / "out").iterdir()
    load = (
        "import sys; from transformers import AutoModelForCausalLM as A; "
        "print(type(A.from_pretrained(sys.argv[1], trust_remote_code=True).model.layers[0].attn).__name__)"
    )
    assert run(environment, tmp_path, "-c", load, str(folder)).splitlines()[-1] == "LeakyAverage"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("", "plugin.yaml: workload.recall.0.task='overwrite': no such recall task; allowed: mqar"),
        ("overwrite", "plugin.yaml: backbones: 'leaky_average' is unknown; allowed: "),
    ],
)
def test_without_the_package_both_are_refused_by_name(change: str, problem: str, tmp_path: Path) -> None:
    text = SPACE.replace("    - {task: overwrite", "    # {task: overwrite") if change else SPACE
    (tmp_path / "plugin.yaml").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "nas", "launch", "--space", "plugin.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert problem in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
