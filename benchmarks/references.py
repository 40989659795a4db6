"""References that prove themselves: how long it takes to score a data set's answers before a run, and the second time.

    python benchmarks/references.py                       # 100,000 references, some minutes on two cores
    python benchmarks/references.py --references 2000

A JSONL file of distinct references is made by grammar (`parts/reference_grammar.py`): of 100, 60 integers, 20 fractions
and decimals, 10 surds and polynomials, 10 sets, intervals, tuples, matrices; one more hangs. They are read and proved
as `headway train` does it, by the verifier `math` with its answers boxed, then once more by other processes, out of
the cache.

Figures: `read_s`, `first_s` and `second_s`, seconds of reading, of the first and of the second proof (start of the
verifiers included); `left_out`, the one that hangs and nothing else; `processes`. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path

from parts.reference_grammar import distinct_references

from headway.config.load import load_experiment
from headway.config.schema import Experiment
from headway.orchestrator.preflight.references import LeftOut, prove_references
from headway.orchestrator.task_sets import load_task_sets
from headway.records.task import Task
from headway.rollout.verification.client import VerifierPool
from headway.runtime.clock import RealClock
from headway.runtime.workers import LocalLauncher

_HANGS = "\\binom{1000000000}{500000000}"
_LIMIT_S = 3.0


def write_experiment(folder: Path, count: int, seed: int) -> Experiment:
    answers = [*distinct_references(count, seed), _HANGS]
    rows = (json.dumps({"prompt": f"task {n}", "answer": answer}) + "\n" for n, answer in enumerate(answers))
    (folder / "tasks.jsonl").write_text("".join(rows))
    (folder / "experiment.toml").write_text(
        f'[run]\ndirectory = "{folder / "run"}"\n[model]\npath = "{folder / "model"}"\n'
        f'[tasks.train]\npath = "{folder / "tasks.jsonl"}"\n'
        f'[verifier]\nname = "math"\ntimeout_s = {_LIMIT_S}\nparameters = {{ extract = "boxed" }}\n'
    )
    return load_experiment(str(folder / "experiment.toml"), [])


async def prove(experiment: Experiment, sets: dict[str, list[Task]]) -> tuple[list[LeftOut], float, int]:
    began_s, clock = time.monotonic(), RealClock()
    pool = VerifierPool(LocalLauncher(clock), experiment.verifier, clock)
    try:
        await pool.start()
        left_out = await prove_references(experiment, sets, pool)
        return left_out, time.monotonic() - began_s, pool.max_workers()
    finally:
        await pool.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--references", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        experiment = write_experiment(Path(folder), asked.references, asked.seed)
        began_s = time.monotonic()
        sets = load_task_sets(experiment)
        read_s = time.monotonic() - began_s
        left_out, first_s, processes = asyncio.run(prove(experiment, sets))
        for one in left_out:
            print(one.line(experiment.tasks.train))
        again, second_s, _ = asyncio.run(prove(experiment, sets))
        assert [one.tasks for one in again] == [one.tasks for one in left_out]
    figures = {"references": asked.references + 1, "read_s": read_s, "first_s": first_s, "second_s": second_s}
    print(f"read in {read_s:.1f} s, proved in {first_s:.1f} s, the second time in {second_s:.1f} s")
    found = {"left_out": sum(len(one.tasks) for one in left_out), "processes": processes}
    print(json.dumps({**{key: round(value, 2) for key, value in figures.items()}, **found}))


if __name__ == "__main__":
    main()
