"""Recipes of the tinker cookbook as they come: a base that solves some of their sums, the hub's data sets as folders of
the working directory, and a recipe as a process.

``HEADWAY_COOKBOOK`` is the Python of an environment with the cookbook and its SDK: `make install-cookbook`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import warm_programs
from tiny_run import HERE

from headway.models.initialise import initialise_model

PYTHON = Path(os.environ.get("HEADWAY_COOKBOOK", HERE.parents[1] / ".venv-cookbook" / "bin" / "python"))
CLIENTS = Path(os.environ.get("HEADWAY_CLIENTS", HERE.parents[1] / ".venv-clients" / "bin" / "python"))
SDK = PYTHON if PYTHON.is_file() else CLIENTS  # has the SDK; without torch, which custom losses need, in the second one
BASE = "Qwen/Qwen3-4B-Instruct-2507"  # by this name recipes choose how conversations become tokens
KEY = "tml-0123456789abcdef"
BOXED = " Provide a numerical answer without units, written inside \\boxed{}."  # rl_loop
ANSWERED = " Write your answer in \\boxed{} format."  # rl_basic
_SPELLED = (
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. "
    "We have r's at positions 3, 8, and 9. \\boxed{3}"
)
_ENVIRONMENT = {"TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}

Message = dict[str, str]


def _said(user: str, assistant: str) -> list[Message]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def conversations(count: int, seed: int, wrong: float = 0.0) -> Iterator[list[Message]]:
    """Sums as three recipes ask for them, solved; a share of them by a little too much or too little."""
    generator = random.Random(seed)
    for number in range(count):
        boxed = number % 8 == 0
        x, y = (generator.randrange(21 if boxed else 101) for _ in range(2))
        answer = max(0, x + y + (generator.choice([-2, -1, 1, 2]) if generator.random() < wrong else 0))
        if not boxed:
            example = _said("What is 4 + 5?", "9") if number % 8 == 1 else []
            yield example + _said(f"What is {x} + {y}?", str(answer))
            continue
        suffix = ANSWERED if number % 16 else BOXED
        example = _said("How many r's are in strawberry?" + suffix, _SPELLED) if number % 32 < 16 else []
        yield example + _said(f"What is {x} + {y}?{suffix}", f"\\boxed{{{answer}}}")


def write_base(folder: Path, steps: int = 500) -> None:
    """``folder/BASE``: a model of 1.1 million weights, cold-started by `headway sft` on sums, half of them wrong."""
    rows = list(conversations(40_000, 0, wrong=0.5))
    texts = [message["content"] for row in rows[:600] for message in row] + 400 * ["user\n", "assistant\n", "What is "]
    sizes: dict[str, int] = {"vocabulary_size": 448, "layers": 4, "width": 160, "heads": 4, "kv_heads": 2}
    initialise_model(folder / "start", texts, intermediate=384, max_positions=512, **sizes)
    (folder / "sums.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    (folder / "sft.toml").write_text(
        f'[run]\ndirectory = "{folder}/sft-run"\n[model]\npath = "{folder}/start"\ntemplate = "chat"\n'
        f'[trainer]\ndevices = ["cpu:0", "cpu:1"]\n[tasks.train]\npath = "{folder}/sums.jsonl"\n'
        f'[sft]\ndata = "{folder}/sums.jsonl"\noutput = "{folder}/{BASE}"\n'
        f"steps = {steps}\nbatch_sequences = 128\nlearning_rate = 3e-3\nwarmup_steps = 20\n"
    )
    (folder / BASE).parent.mkdir(parents=True)
    outputs: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command = ["sft", str(folder / "sft.toml")]
    trained = warm_programs.start(warm_programs.HEADWAY, *command, environment=dict(os.environ), **outputs)
    output, _ = trained.communicate(timeout=1500)
    assert trained.returncode == 0, output


def write_data(folder: Path) -> None:
    """The data sets that the recipes load, by the hub's names."""
    generator = random.Random(1)
    pairs = [(x, y) for x in range(21) for y in range(21)] * 3
    generator.shuffle(pairs)
    sums = [{"question": f"What is {x} + {y}?", "answer": f"#### {x + y}"} for x, y in pairs]
    chats = [{"messages": row[-2:]} for row in conversations(1200, 2)]
    preferred = [
        {name: f"\n\nHuman: What is {x} + {y}?\n\nAssistant: {z}" for name, z in (("chosen", x + y), ("rejected", x))}
        for x, y in pairs
        if y
    ]
    choices = [
        {
            "question": f"What is {x} + {y}?",
            "choices": {"label": ["A", "B"], "text": [str(x + y), str(x + y + 1)]},
            "answerKey": "A",
            "domain": "Chemistry",
            "type": "mcq-2-choices",
            "details": {"level": "L3"},
        }
        for x, y in pairs
    ]
    _write_set(folder / "openai/gsm8k", {"main/train": sums, "main/test": sums[:32]}, "main")
    _write_set(folder / "HuggingFaceH4/no_robots", {"train": chats, "test": chats[:32]})
    _write_set(folder / "Anthropic/hh-rlhf", {"train": preferred, "test": preferred[:32]})
    _write_set(folder / "zwhe99/DeepMath-103K", {"train": [{"question": row["question"]} for row in sums]})
    _write_set(folder / "hicai-zju/SciKnowEval", {"test": choices})


def _write_set(folder: Path, splits: Mapping[str, Sequence[dict[str, Any]]], configuration: str = "default") -> None:
    files = ""
    for name, rows in splits.items():
        file = folder / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files += f"  - split: {file.stem}\n    path: {name}.jsonl\n"
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {configuration}\n  data_files:\n{files}---\n")


def start_recipe(folder: Path, recipe: str, address: str, log: str, **options: Any) -> subprocess.Popen[str]:
    """Start ``python -m tinker_cookbook.recipes.RECIPE`` in ``folder``; ``options`` by their dotted names, with ``__``
    for a dot; None: the recipe has no such one. Its output is in ``folder/LOG.txt``."""
    chosen = {"base_url": address, "model_name": BASE, "log_path": str(folder / log), "lora_rank": 8, **options}
    words = [f"{name.replace('__', '.')}={value}" for name, value in chosen.items() if value is not None]
    with (folder / f"{log}.txt").open("a") as output:
        return subprocess.Popen(
            [str(PYTHON), "-m", f"tinker_cookbook.recipes.{recipe}", *words],
            cwd=folder,
            env={**os.environ, **_ENVIRONMENT, "HF_HOME": str(folder / "hub")},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )


def run_recipe(folder: Path, recipe: str, address: str, log: str, **options: Any) -> list[dict[str, Any]]:
    """Run a recipe to its end; returns its metrics, a row for each step."""
    program = start_recipe(folder, recipe, address, log, **options)
    began_s = time.monotonic()
    status = program.wait(timeout=600)
    output = (folder / f"{log}.txt").read_text()
    assert status == 0, output[-6000:]
    rows = metrics_of(folder / log)
    print(f"{log}: {len(rows)} steps in {time.monotonic() - began_s:.0f} s")
    return rows


def metrics_of(log: Path) -> list[dict[str, Any]]:
    """What a recipe has recorded so far."""
    file = log / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def site_of(python: Path) -> Path:
    """The folder of an environment's packages."""
    (site,) = python.parents[1].glob("lib/python3*/site-packages")
    return site


def changed_packages(names: Sequence[str]) -> list[str]:
    """Files of installed packages that aren't what their wheels' RECORD says."""
    site = site_of(PYTHON)
    wrong: list[str] = []
    for name in names:
        (record,) = site.glob(f"{name}-*.dist-info/RECORD")
        for line in record.read_text().splitlines():
            path, digest, _ = line.rsplit(",", 2)
            if digest and not path.startswith(".."):
                algorithm, _, expected = digest.partition("=")
                content = hashlib.new(algorithm, (site / path.strip('"')).read_bytes()).digest()
                if base64.urlsafe_b64encode(content).rstrip(b"=").decode() != expected:
                    wrong.append(path)
    return wrong
