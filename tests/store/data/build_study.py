"""Built a database with the studies of a simulated launch, by the code of its time: python build_study.py FILE.

`revision_0001_study.db` by the code of commit 77ad8b5, `revision_0002.db` by the code that came with that revision.
Kept as the record of what the files hold; later code, whose schema is newer, cannot build them again.
"""

from __future__ import annotations

import sqlite3
import sys

from nas.search.simulator import SimulatedPool
from nas.service import Request, launch
from nas.store import Store
from search_spaces.loading import parse_space

SPACE = """
name: small
backbones: [gated_deltanet, gla]
ratios: [pure, "4:1", [1, 2]]
kv_groups: [1, 2]
routing: [none, clvr]
optimizers: {adamw: {lr: {low: 1e-3, high: 1e-2}}}
proxy: {layers: 4, hidden_size: 64, intermediate_size: 128, heads: 2, head_dim: 32, sequence_length: 64, batch_size: 40}
workload: {text: {weight: 0}, report_every: 100}
rungs: {steps: [100, 200]}
"""


def main(path: str) -> None:
    storage = f"sqlite:///{path}"
    space = parse_space(SPACE, "small")
    launch(Request(space=space, study="small", storage=storage, trials=10, seed=3), pool=lambda plan: SimulatedPool(2))
    without = parse_space(SPACE.replace("layers: 4", "layers: 4, rope_theta: null"), "nope")
    with Store.open(storage) as store:
        store.create_study("nope", without.canonical(), without.digest, seed=0)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    connection.execute("VACUUM")
    connection.close()


if __name__ == "__main__":
    main(sys.argv[1])
