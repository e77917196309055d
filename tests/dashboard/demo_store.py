"""A small study like the CPU demo's, by seed: `python tests/dashboard/demo_store.py sqlite:///FILE`."""

from __future__ import annotations

import math
import random
import sys

from nas.architecture import Candidate
from nas.messages import Failed, Failure, Finished, Measurement, TrialState
from nas.search.records import facts
from nas.store import Store
from search_spaces.designs import Recorder, Value, baselines, candidate
from search_spaces.loading import load_space
from search_spaces.schema import SearchSpace

STUDY = "demo"
SKILL = {"gated_deltanet": 1.0, "deltanet": 0.86, "retnet": 0.7, "gla": 0.62}
"""How well a backbone recalls here: made up, in the order that papers report."""


def fill(url: str, trials: int = 28, seed: int = 0, study: str = STUDY) -> None:
    """Writes a study with complete, pruned, failed and running trials."""
    space, generator = load_space("cpu-demo"), random.Random(seed)
    with Store.open(url) as store:
        info = store.create_study(study, space.canonical(), space.digest, seed)
        for number, (found, prior) in enumerate(_candidates(space, trials, generator)):
            store.add_trial(
                info.id,
                candidate=found.canonical(),
                candidate_digest=found.digest,
                architecture_digest=found.architecture.digest,
                params={},
                sampler_state={},
                facts=facts(space, found),
                prior=prior,
            )
            last = number >= trials - 2
            _train(store, info.id, number, found, space, generator, prior == "baseline", running=last)


def empty(url: str, study: str = STUDY) -> None:
    """Writes a study without a trial."""
    space = load_space("cpu-demo")
    with Store.open(url) as store:
        store.create_study(study, space.canonical(), space.digest, 0)


def _candidates(space: SearchSpace, trials: int, generator: random.Random) -> list[tuple[Candidate, str]]:
    found = [(item, "baseline") for item in baselines(space)]
    seen = {item.digest for item, _ in found}
    while len(found) < trials:
        params: dict[str, Value] = {
            "backbone": generator.choice(space.backbones),
            "ratio": generator.choice([str(ratio) for ratio in space.ratios]),
            "placement": generator.choice(space.placements),
            "kv_groups": generator.choice(space.kv_groups),
            "routing": generator.choice(space.routing),
            "optimizer": generator.choice(list(space.optimizers)),
            "lr_adamw": math.exp(generator.uniform(math.log(1.6e-3), math.log(5.8e-3))),
            "lr_muon": math.exp(generator.uniform(math.log(5.1e-3), math.log(2.9e-2))),
        }
        item = candidate(space, Recorder(params))
        if item.digest not in seen:
            seen.add(item.digest)
            found.append((item, "sampled"))
    return found[:trials]


def _train(
    store: Store,
    study: int,
    number: int,
    found: Candidate,
    space: SearchSpace,
    generator: random.Random,
    baseline: bool,
    running: bool,
) -> None:
    rungs, ceiling = space.rungs.steps, _ceiling(found, generator)
    for rung, stop in enumerate(rungs):
        attempt = store.start_segment(study, number, rung)
        scores = _scores(found, space, ceiling, stop, generator)
        store.record(study, number, attempt, _losses(ceiling, stop, generator))
        if running and rung == 1:
            return
        if number == 11 and rung == 1:
            failed = Failed(trial=number, attempt=attempt, kind=Failure.DIVERGED, message="loss is nan at step 163")
            store.fail_segment(study, failed, state=TrialState.FAILED)
            return
        stopped = not baseline and not running and ceiling < 0.42 + 0.14 * rung
        last = stopped or rung == len(rungs) - 1
        state = (TrialState.PRUNED if stopped else TrialState.COMPLETE) if last else TrialState.PAUSED
        finished = Finished(
            trial=number, attempt=attempt, step=stop, checkpoint=f"c/{number}", seconds=generator.uniform(4, 9),
            measurements=scores,
        )  # fmt: skip
        store.finish_segment(study, finished, state=state, rung=rung)
        if last:
            return


def _ceiling(found: Candidate, generator: random.Random) -> float:
    architecture = found.architecture
    skill = SKILL[architecture.backbones[0]] if architecture.backbones else 1.0
    full = len(architecture.full_attention_layers) / len(architecture.layers)
    late = 0.05 if architecture.placement in ("late", "interleaved") else -0.05
    routed = 0.05 if architecture.routing.kind == "clvr" else 0.0
    mixed = 0.62 * skill + 0.42 * min(1.0, 2.5 * full) * (0.75 + 0.25 * skill) + late + routed
    return min(0.995, max(0.12, mixed - abs(generator.gauss(0, 0.07))))


def _scores(
    found: Candidate, space: SearchSpace, ceiling: float, step: int, generator: random.Random
) -> tuple[Measurement, ...]:
    pairs = space.workload.recall[0].evaluation_pairs
    grown = 0.0625 + (ceiling - 0.0625) / (1 + math.exp(-(step - 120) / 45))
    sizes = [min(1.0, max(0.0, grown * (1.08 - 0.04 * index))) for index, _ in enumerate(pairs)]
    named = {f"recall/mqar/{pair}": value for pair, value in zip(pairs, sizes, strict=True)}
    named |= {"recall": sum(sizes) / len(sizes), "recall_nll": 2.77 * (1 - grown)}
    named |= {"loss": 2.4 + 2.2 * math.exp(-step / 110) - 0.15 * ceiling + generator.uniform(-0.02, 0.02)}
    return tuple(Measurement(step=step, name=name, value=value) for name, value in named.items())


def _losses(ceiling: float, stop: int, generator: random.Random) -> tuple[Measurement, ...]:
    steps = range(max(10, stop - 90), stop + 1, 10)
    return tuple(
        Measurement(
            step=step,
            name="train_loss",
            value=2.3 + 2.4 * math.exp(-step / 100) - 0.15 * ceiling + generator.uniform(-0.08, 0.08),
        )
        for step in steps
    )


if __name__ == "__main__":
    fill(sys.argv[1])
