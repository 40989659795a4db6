"""The example workflows: short, and the same bits under every plan as `headway train`."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from safetensors.numpy import load_file
from tiers import first

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
ROOT = Path(__file__).resolve().parents[2]
SPATIAL = {"generate": "cpu:0", "score": "cpu:0", "train": "cpu:1"}
TEMPORAL = dict.fromkeys(SPATIAL, "cpu:0")
HYBRID = {"generate": ["cpu:0", "cpu:1"], "score": "cpu:0", "train": "cpu:1"}
MODES = [SPATIAL, TEMPORAL, HYBRID]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grpo")
    tiny_run.write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def trained(inputs: Path) -> Callable[[int | None], tuple[Path, Path]]:
    """A function that trains 5 steps by `headway train` at budget 0 with so many groups in a part (None: all); returns
    experiment and model."""

    @cache
    def train(part: int | None) -> tuple[Path, Path]:
        folder = inputs / f"part-{part}"
        folder.mkdir()
        queue = {"budget": 0} | ({} if part is None else {"groups_per_part": part})
        sections: Any = tiny_run.inputs_in(inputs) | {"run": {"deterministic": True, "steps": 5}, "queue": queue}
        config = tiny_run.write_experiment(folder, checkpoint={"every_steps": 5}, **sections)
        tiny_run.output_of("train", config, "--quiet")
        return config, folder / "run/checkpoints/step_00000005/model"

    return train


def written(plan: dict[str, Any], chunk: int | None) -> str:
    """The plan as JSON, where training takes ``chunk`` groups at once."""
    chunks = {"train": {"chunk": chunk}}
    stages = {
        stage: {"devices": [devices] if isinstance(devices, str) else devices} | chunks.get(stage, {})
        for stage, devices in plan.items()
    }
    return json.dumps({"stages": stages, "items": 4})


def weights(model: Path) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in load_file(model / "model.safetensors").items()}


@pytest.mark.slow
@pytest.mark.parametrize("case", first(3, [(plan, part) for part in (2, None, 1) for plan in MODES]))
def test_grpo_trains_the_weights_of_headway_train_wherever_its_stages_are(
    trained: Callable[[int | None], tuple[Path, Path]], tmp_path: Path, case: tuple[dict[str, Any], int | None]
):
    plan, part = case
    config, model = trained(part)
    if plan is TEMPORAL:
        text = config.read_text()
        assert "[run]\n" in text
        config = tmp_path / "offloads.toml"
        config.write_text(text.replace("[run]\n", "[run]\noffload = true\n"))
    output = tmp_path / "model"
    program = ROOT / "examples" / "flow_grpo.py"
    code, _, errors = tiny_run.run_program(program, config, written(plan, part), output)
    assert code == 0, errors
    assert weights(output) == weights(model)


@pytest.mark.parametrize("example", ["flow_grpo.py", "flow_judged.py"])
def test_examples_are_at_most_a_hundred_lines_of_code(example: str):
    text = (ROOT / "examples" / example).read_text()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            lines.add(token.start[0])
    assert len(lines) <= 100


@pytest.mark.slow
@pytest.mark.long
def test_five_stages_train_alike_apart_and_in_turns(inputs: Path, trained: Callable[[int | None], tuple[Path, Path]]):
    said: list[str] = []
    for plan in (
        dict.fromkeys(("generate", "reference", "reward", "judge"), "cpu:0") | {"train": "cpu:1"},
        dict.fromkeys(("generate", "reference", "reward", "judge", "train"), "cpu:0"),
    ):
        model = str(inputs / "model")
        program = [str(ROOT / "examples" / "flow_judged.py"), str(trained(None)[0]), model, model]
        command = [sys.executable, *program, json.dumps(plan)]
        said.append(subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True).stdout)
    assert said[0] == said[1]
    assert len(said[0].splitlines()) == 5


def test_the_documented_workflow_prints_what_the_page_says(tmp_path: Path):
    program, output = re.findall(r"```(?:python|text)\n(.*?)```", (ROOT / "docs/flow.md").read_text(), re.DOTALL)[:2]
    script = tmp_path / "squares.py"
    script.write_text(program)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == (output, 0), done.stderr
