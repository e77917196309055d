"""The model room's files, copied flat beside a checkpoint, load through transformers where nas is not importable."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import nas.models.modeling as modeling
from nas.export.hub import name_modules

ROOM = Path(modeling.__file__).parent
LOAD = """
import sys, torch, warnings
warnings.simplefilter("ignore")
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
assert "nas" not in sys.modules
inputs = torch.load(sys.argv[1] + "/ids.pt")
text = model.generate(inputs, max_new_tokens=4, do_sample=False)
exempt = [name for name, p in model.named_parameters() if getattr(p, "_no_weight_decay", False)]
torch.save({"logits": model(inputs).logits.detach(), "text": text, "exempt": exempt}, sys.argv[1] + "/out.pt")
"""


def test_loads_without_nas(make_model: Callable[..., modeling.HybridForCausalLM], tmp_path: Path) -> None:
    model = make_model("gated_deltanet", "hgrn2", "softmax", "retnet", clvr=True, rank=2)
    folder, ids = tmp_path / "model", torch.randint(50, (2, 20))
    model.save_pretrained(folder)
    for file in ROOM.glob("*.py"):
        if file.name != "__init__.py":
            shutil.copy(file, folder)
    name_modules(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["auto_map"] = {
        "AutoConfig": "configuration.HybridConfig",
        "AutoModelForCausalLM": "modeling.HybridForCausalLM",
    }
    path.write_text(json.dumps(config))
    torch.save(ids, folder / "ids.pt")
    environment = os.environ | {"HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOAD, str(folder)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    loaded = torch.load(folder / "out.pt")
    assert torch.equal(loaded["logits"], model(ids).logits)
    assert torch.equal(loaded["text"], model.generate(ids, max_new_tokens=4, do_sample=False))
    assert loaded["exempt"] == ["model.layers.0.attn.A_log", "model.layers.0.attn.dt_bias"]
