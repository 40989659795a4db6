"""`examples/flow_grpo.py` against `headway train`: samples a second of the same experiment on the same devices."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from flow_grpo import grpo

from headway.config.schema import Experiment
from headway.flow.run import Flow, run
from headway.records.execution import FlowStep
from headway.records.ledger import StepRecord
from headway.telemetry.ledger import read_ledger
from parts.pipeline_load import Shape, apart, experiment, prepare

STEPS, COUNTED, PAIRS = 8, 6, 3
SHAPE = Shape(
    layers=4, width=192, heads=6, intermediate=512, prompt_tokens=16, median_tokens=96, spread=0.0, longest_tokens=128
)


_TRAIN = """
import sys
from headway.api import train
from headway.config.load import validate_experiment
import json
train(validate_experiment(json.load(open(sys.argv[1])), "benchmark"))
"""


async def timed_grpo(flow: Flow, settings: Experiment, output: str) -> list[FlowStep]:
    """The example's steps."""
    await grpo(flow, settings, output)
    return list(flow.history)


def flow_over_builtin(folder: Path) -> dict[str, Any]:
    """Median of the pairs' ratios of median step times, after two steps that aren't counted."""
    if not (folder / "model").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder, SHAPE)
    settings = experiment(folder, "run", SHAPE, placement=apart(64), budget=0, steps=STEPS)
    queue = settings.queue.model_copy(update={"filter_zero_variance": False})  # both train on the same groups
    settings = settings.model_copy(update={"queue": queue})
    file = folder / "experiment.json"
    ratios: list[float] = []
    generator, trainer = settings.generator.devices[0], settings.trainer.devices[0]
    plan = {"generate": generator, "score": generator, "train": trainer}
    for pair in range(PAIRS):
        shutil.rmtree(folder / "run", ignore_errors=True)
        file.write_text(settings.model_dump_json())
        subprocess.run([sys.executable, "-c", _TRAIN, str(file)], check=True, stdout=subprocess.DEVNULL)
        records = [line for line in read_ledger(folder / "run") if isinstance(line, StepRecord)]
        builtin_s = statistics.median(record.step_s for record in records[-COUNTED:])
        steps = run(timed_grpo, plan, settings, str(folder / "flow-model"))
        flow_s = statistics.median(step.seconds for step in steps[-COUNTED:])
        ratios.append(builtin_s / flow_s)
        print(f"builtin: pair {pair + 1} of {PAIRS}: headway train {builtin_s:.3f} s, flow {flow_s:.3f} s", flush=True)
    return {"flow_over_builtin": statistics.median(ratios), "flow_over_builtin_pairs": ratios}
