"""Does the quickstart learn over two machines as on one? One cold start, then RL of the same seed three times: on this
machine; over two network namespaces, the trainer on one and the generator on the other, each uplink held to `--rate`
by tc; and with a node that Ray starts in a cluster of two.

    python benchmarks/nodes_quickstart.py --seed 0 > benchmarks/results/nodes-quickstart.txt

Needs root (namespaces) and Ray. Prints one JSON object a run: solve rate on the held-out test before and after, the
latter's standard error, steps, seconds of training, the largest staleness trained on (the budget is 2), the node
that joined and the validation curve (seconds, solve rate). Other arguments go to `headway train`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from node_processes import KEY, namespaces, start_agent  # noqa: E402

from headway.buffer.audit import audit_run  # noqa: E402
from headway.records.ledger import EvaluationRecord, EventRecord, StepRecord  # noqa: E402
from headway.runtime.nodes.handshake import KEY_VARIABLE  # noqa: E402
from headway.telemetry.ledger import read_ledger  # noqa: E402

QUICKSTART = ROOT / "examples" / "arithmetic"
Started = tuple[list[str], list[str], dict[str, str]]  # words before the command, its overrides, its environment


@contextmanager
def one_machine(folder: Path, rate: str) -> Iterator[Started]:
    yield [], [], {}


@contextmanager
def two_namespaces(folder: Path, rate: str) -> Iterator[Started]:
    address = "10.77.0.1:7400"
    with namespaces(2, rate) as (here, there):
        agent = start_agent(address, "b", log=folder / "b.log", namespace=there)
        nodes = [f"--cluster.address={address}", '--cluster.nodes=["b"]', '--generator.devices=["b/cpu:0"]']
        yield ["ip", "netns", "exec", here], nodes, {KEY_VARIABLE: KEY}
        agent.wait(30)


@contextmanager
def two_ray_nodes(folder: Path, rate: str) -> Iterator[Started]:
    cluster = importlib.import_module("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80_000_000}
    )
    cluster.add_node(num_cpus=1, object_store_memory=80_000_000)
    nodes = ["--cluster.address=127.0.0.1:0", "--cluster.launcher=ray", '--cluster.nodes=["b"]']
    try:
        yield [], [*nodes, '--generator.devices=["1*cpu"]'], {"RAY_ADDRESS": cluster.address}
    finally:
        cluster.shutdown()


def figures(run: Path, name: str) -> dict[str, object]:
    """The outcome of a run; raises RuntimeError when its audit finds a group lost or trained twice."""
    report = audit_run(run)
    if report.violations:
        raise RuntimeError(f"{run}: {report.violations}")
    lines = read_ledger(run)
    rates = {r.phase: r for r in lines if isinstance(r, EvaluationRecord) and r.split == "test"}
    curve = [r for r in lines if isinstance(r, EvaluationRecord) and r.split == "validation"]
    steps = [line for line in lines if isinstance(line, StepRecord)]
    return {
        "run": name,
        "before": round(rates["before"].solve_rate, 4),
        "after": round(rates["after"].solve_rate, 4),
        "standard_error": round(rates["after"].standard_error, 4),
        "steps": len(steps),
        "training_s": round(curve[-1].time_s),
        "max_staleness": report.max_staleness,
        "joined": [e.detail for e in lines if isinstance(e, EventRecord) and e.event == "node_joined"],
        "curve": [(round(r.time_s), round(r.solve_rate, 3)) for r in curve],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=Path("runs/benchmark-nodes-quickstart"))
    parser.add_argument("--rate", default="100mbit", help="of each uplink between the namespaces, as tc writes it")
    places = {"one machine": one_machine, "two namespaces": two_namespaces, "two Ray nodes": two_ray_nodes}
    parser.add_argument("--only", choices=places)
    arguments, overrides = parser.parse_known_args()
    folder = arguments.directory.resolve()
    seed = ["--seed", str(arguments.seed)]
    os.environ["PYTHONPATH"] = str(ROOT)
    log = (folder.parent / f"{folder.name}.log").open("a")
    cold = [sys.executable, "-m", "headway.cli.main", "quickstart", str(folder), *seed, "--cold-start-only"]
    subprocess.run(cold, check=True, stdout=log, stderr=log)
    for name, start in places.items():
        if arguments.only not in (None, name):
            continue
        run = folder / f"rl-{name.replace(' ', '-')}"
        with start(folder, arguments.rate) as (before, nodes, environment):
            train = [sys.executable, "-m", "headway.cli.main", "train", str(QUICKSTART / "experiment.toml"), "--quiet"]
            paths = [f"--tasks.{part}.path={folder}/tasks/{part}.jsonl" for part in ("train", "validation", "test")]
            train += [f"--model.path={folder}/sft", f"--run.directory={run}", f"--run.seed={arguments.seed}", *paths]
            command = [*before, *train, *nodes, *overrides]
            subprocess.run(command, check=True, stdout=log, stderr=log, env=os.environ | environment)
        print(json.dumps(figures(run, name)), flush=True)


if __name__ == "__main__":
    main()
