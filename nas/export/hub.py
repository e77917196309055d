"""Hugging Face folders: configuration, safetensors, flat modelling code, tokenizer and card.

They load with `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` where torch, triton, fla and
transformers are installed, without this package, on a CPU too: the CPU kernels travel with the code (design.md 9).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nas.architecture import Candidate
from nas.export.card import model_card
from nas.export.errors import ExportError, WriteError
from nas.messages import TrialState
from nas.search.records import record
from nas.store import Store, StudyInfo, TrialRow
from nas.workload import Workload

if TYPE_CHECKING:
    from nas.models.modeling import HybridForCausalLM


def export_trials(store: Store, study: str | None, numbers: Sequence[int], out: Path) -> list[Path]:
    """Writes one folder `<study>-<number>` per trial below `out`, each whole or not at all.

    Args:
        store: open for reading.
        study: name; the latest if None.
        numbers: trials with a checkpoint.
        out: made if missing. An earlier export of the same trial is replaced; any other folder is left alone.

    Raises:
        WriteError: it was begun and failed, as on a full disk.
        ExportError: a trial has no readable checkpoint, or the folder is taken or not writable.
        StudyNotFound, TrialNotFound: as named.
    """
    info = store.study(study)
    rows = [store.trial(info.id, number) for number in numbers]
    for row in rows:
        if row.checkpoint is None:
            raise ExportError(f"trial {info.name}/{row.number} has no checkpoint; its state is {row.state.value}")
        _check_target(out / f"{info.name}-{row.number}")
    return [_export(info, row, out / f"{info.name}-{row.number}") for row in rows]


def _check_target(target: Path) -> None:
    if not target.exists():
        return
    config = target / "config.json"
    try:
        ours = json.loads(config.read_text(encoding="utf-8")).get("model_type") == "nas_hybrid"
    except (OSError, ValueError):
        ours = False
    if not ours:
        raise ExportError(f"out={str(target)!r} exists and is no export of ours; choose another --out")


def _export(info: StudyInfo, row: TrialRow, target: Path) -> Path:
    from safetensors import SafetensorError

    model = load_model(row)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise ExportError(f"out={str(target.parent)!r} cannot be written: {error.strerror}") from error
    try:
        _write(info, row, model, partial)
        partial.chmod(0o755)
        for file in partial.iterdir():
            file.chmod(0o644)  # safetensors writes 0600; a shared folder is to be read
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        raise WriteError(f"out={str(target)!r} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def load_model(row: TrialRow) -> HybridForCausalLM:
    """The trial's model with the weights that were scored: raw at the top rung, their moving average below it.

    Raises:
        ExportError: the checkpoint is missing or damaged.
    """
    from nas.models.configuration import HybridConfig
    from nas.models.modeling import HybridForCausalLM
    from nas.training.checkpoints import CheckpointError, load

    assert row.checkpoint is not None
    try:
        state = load(row.checkpoint)
    except CheckpointError as error:
        raise ExportError(f"trial {row.number}: {error}") from error
    candidate = Candidate.model_validate(row.candidate)
    model = HybridForCausalLM(HybridConfig(architecture=candidate.architecture.canonical()))
    model.load_state_dict(state.model if row.state is TrialState.COMPLETE else state.average)
    return model.eval()


def _write(info: StudyInfo, row: TrialRow, model: HybridForCausalLM, folder: Path) -> None:
    from transformers.utils import logging

    from nas.models.configuration import HybridConfig
    from nas.models.modeling import HybridForCausalLM
    from nas.training.data.tokenizer import ByteTokenizer

    logging.disable_progress_bar()
    # transformers' own way of shipping code: save_pretrained copies the modelling files and fills `auto_map`.
    HybridConfig.register_for_auto_class()
    HybridForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    model.save_pretrained(folder)
    name_modules(folder)
    workload = Workload.model_validate(info.space["workload"])
    ByteTokenizer.of(workload).to_hugging_face().save_pretrained(folder)
    facts = record(info.name, row)
    (folder / "README.md").write_text(model_card(facts, Candidate.model_validate(row.candidate)), encoding="utf-8")
    (folder / "nas.json").write_text(
        json.dumps({"trial": facts, "candidate": row.candidate, "space": info.space}, indent=1, allow_nan=False),
        encoding="utf-8",
    )


def name_modules(folder: Path) -> None:
    """Make the exported modeling.py name every module beside it.

    Up to 5.9 transformers copies to its cache only the modules that modeling.py itself imports, as far as a pattern
    finds them in its text, not those that they import in turn. A string is enough for the pattern, and runs nothing.
    """
    names = sorted(path.stem for path in folder.glob("*.py") if path.stem != "modeling")
    lines = "\n".join(f"from .{name} import *" for name in names)
    with (folder / "modeling.py").open("a", encoding="utf-8") as code:
        code.write(
            f'\n\n_MODULES = """For transformers up to 5.9, which copies only modules named here:\n{lines}\n"""\n'
        )
