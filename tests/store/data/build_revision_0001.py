"""Built revision_0001.db with the code of that revision: python tests/store/data/build_revision_0001.py FILE.

Kept as the record of what the file holds; later code, whose schema is newer, cannot build it again.
"""

from __future__ import annotations

import sys
from typing import Any

from nas.messages import Failed, Failure, Finished, Measurement, TrialState
from nas.store import Store, schema


def main(path: str) -> None:
    assert schema.HEAD == "0001"
    with Store.open(f"sqlite:///{path}") as store:
        study = store.create_study("old", {"backbones": ["gla"]}, "space-1", seed=7)
        store.set_meta(study.id, "note", "kept")
        for number in range(4):
            documents: dict[str, Any] = {
                "candidate": {"seed": number},
                "params": {"lr": 1e-3},
                "sampler_state": {"nsga2:generation": 0},
                "facts": {"kv_cache_bytes": 1024},
            }
            store.add_trial(
                study.id,
                **documents,
                candidate_digest=f"candidate-{number}",
                architecture_digest="architecture",
                prior="sampled",
            )
        for number in range(3):
            store.start_segment(study.id, number, rung=0)
        loss, recall = (
            Measurement(step=100, name=name, value=value) for name, value in (("loss", 2.0), ("recall", 0.5))
        )
        store.record(study.id, 0, 1, [Measurement(step=50, name="loss", value=3.0)])
        finished = Finished(
            trial=0, attempt=1, step=100, checkpoint="step-100", seconds=1.5, measurements=(loss, recall)
        )
        store.finish_segment(study.id, finished, state=TrialState.COMPLETE, rung=0)
        failed = Failed(trial=1, attempt=1, kind=Failure.DIVERGED, message="loss is nan", step=30, seconds=0.5)
        store.fail_segment(study.id, failed, state=TrialState.FAILED)


if __name__ == "__main__":
    main(sys.argv[1])
