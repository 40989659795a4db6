"""Samples a second of runs whose generators are behind slow links, in network namespaces held to a rate by tc.

    python benchmarks/weight_links.py [--steps 12] [--only slow,whole]

A model of 49 M parameters, trained in float32 at 1e-6 and published in bfloat16 to the `torch` engine, η = 4. Rows:
`fast`, links without a limit; `slow`, the trainer's uplink at 20 Mbit/s, over which a whole version takes 39 s;
`whole`, the same without deltas; `one`, one generator without a limit; `beside`, a second one behind 2 Mbit/s. Prints
one JSON object a run: samples a second from the third step on, deltas' shares of whole versions, the largest staleness
trained on, overdue rollouts, each replica's version at the end of each step; and as the last line one with the ratios
`slow_over_fast`, `whole_over_fast`, `beside_over_one`. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from node_processes import KEY, namespaces, start_agent  # noqa: E402

from headway.buffer.audit import audit_run  # noqa: E402
from headway.records.ledger import StepRecord  # noqa: E402
from headway.runtime.nodes.handshake import KEY_VARIABLE  # noqa: E402
from headway.telemetry.ledger import read_ledger  # noqa: E402

ADDRESS = "10.77.0.1:7400"
FILE = """
[run]
directory = "{run}"
steps = {steps}
[model]
path = "{model}"
[tasks.train]
path = "{tasks}"
[verifier]
name = "spread_reward:score"
[rollout]
group_size = 4
max_prompt_tokens = 32
max_response_tokens = 24
[generator]
devices = {devices}
slots = 16
dtype = "bfloat16"
[queue]
groups_per_step = 2
budget = 4
filter_zero_variance = false
[trainer]
devices = ["cpu:1"]
dtype = "float32"
learning_rate = 1e-6
micro_batch_tokens = 512
[weights]
whole_every = {whole_every}
[evaluation]
test = "never"
[checkpoint]
every_steps = 1000
[cluster]
address = "{address}"
nodes = {nodes}
"""
ROWS: dict[str, dict[str, Any]] = {
    "fast": {"nodes": "b"},
    "slow": {"nodes": "b", "uplink": "20mbit"},
    "whole": {"nodes": "b", "uplink": "20mbit", "whole_every": 1},
    "one": {"nodes": "b"},
    "beside": {"nodes": "bc", "last": "2mbit"},
}


def limit(device: str, rate: str, namespace: str = "") -> None:
    where = ["-n", namespace] if namespace else []
    words = ["qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, "burst", "64kb", "latency", "100ms"]
    subprocess.run(["tc", *where, *words], check=True)


def measure(
    name: str, folder: Path, steps: int, *, nodes: str, uplink: str = "", last: str = "", whole_every: int = 256
):
    run, file = folder / name, folder / f"{name}.toml"
    devices = json.dumps([f"{node}/cpu:0" for node in nodes])
    paths = {"run": run, "model": folder / "model", "tasks": folder / "tasks.jsonl", "steps": steps, "address": ADDRESS}
    file.write_text(FILE.format(devices=devices, nodes=json.dumps(list(nodes)), whole_every=whole_every, **paths))
    with namespaces(1 + len(nodes)) as (here, *there), (folder / f"{name}.log").open("w") as log:
        if uplink:
            limit("e0", uplink, here)
        if last:
            limit(f"v{os.getpid() % 100000}n{len(nodes)}", last)
        agents = [
            start_agent(ADDRESS, node, log=folder / f"{name}-{node}.log", namespace=space)
            for node, space in zip(nodes, there, strict=True)
        ]
        command = ["ip", "netns", "exec", here, sys.executable, "-m", "headway.cli.main", "train", str(file), "--quiet"]
        subprocess.run(command, check=True, stdout=log, stderr=log, env=os.environ | {KEY_VARIABLE: KEY})
        for agent in agents:
            agent.wait(60)
    lines = [line for line in read_ledger(run) if isinstance(line, StepRecord)]
    later = lines[2:]
    audit = audit_run(run)
    return {
        "run": name,
        "samples_per_s": round(sum(step.samples for step in later) / sum(step.step_s for step in later), 3),
        "step_s": [round(step.step_s, 1) for step in lines],
        "delta_share": [round(s.weights.delta_bytes / s.weights.size_bytes, 5) for s in later if s.weights],
        "encode_s": [round(s.weights.encode_s, 2) for s in later if s.weights],
        "max_staleness": audit.max_staleness,
        "violations": audit.violations,
        "overdue": sum(step.endings.get("overdue", 0) for step in lines),
        "replica_versions": [step.replica_versions for step in lines],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--directory", type=Path, default=Path("runs/benchmark-weight-links"))
    parser.add_argument("--only", default=",".join(ROWS))
    arguments = parser.parse_args()
    folder = arguments.directory.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks" / "parts")])
    tasks = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 50) for b in range(10, 20)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    if not (folder / "model").exists():
        sizes = ["--layers=10", "--width=640", "--heads=10", "--kv-heads=5", "--intermediate=1760"]
        words = [
            "init-model",
            str(folder / "model"),
            "--texts",
            str(folder / "tasks.jsonl"),
            "--character-level",
            *sizes,
        ]
        subprocess.run([sys.executable, "-m", "headway.cli.main", *words], check=True, stdout=subprocess.DEVNULL)
    rates: dict[str, float] = {}
    for name in arguments.only.split(","):
        report = measure(name, folder, arguments.steps, **ROWS[name])
        rates[name] = report["samples_per_s"]
        print(json.dumps(report), flush=True)
    pairs = {
        "slow_over_fast": ("slow", "fast"),
        "whole_over_fast": ("whole", "fast"),
        "beside_over_one": ("beside", "one"),
    }
    ratios = {key: rates[a] / rates[b] for key, (a, b) in pairs.items() if {a, b} <= rates.keys()}
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
