"""Kernel tasks, a random model, a supervised cold start, RL by what a kernel service measures, scores before and after.

    python examples/kernels/run.py --seed 0

Runs each step by the command a user would type, prints it, and skips what an earlier run of the same seed has done. The
kernel service has core 1 to itself for timing; everything else is on core 0.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.api import Recipe

HERE = Path(__file__).resolve().parent
CONFIG = os.path.relpath(HERE / "experiment.toml")
CLI = ("-m", "headway.cli.main")
SIZES = "--vocabulary-size 640 --layers 4 --width 128 --intermediate 352"  # of the model
SERVICE = "--port 0 --cores 1 --timing-s 0.25 --concurrency 2"
TEMPLATE = """\
{%- for message in messages -%}
{{- message.content + ('<|eos|>' if message.role == 'assistant' else '\\n') -}}
{%- endfor -%}"""


@contextmanager
def serving(ready: str, *command: str) -> Iterator[str]:
    """Run a service of ``headway`` for the block; its address is what follows ``ready`` in its output."""
    print("\n$ " + " ".join(("headway", *command)) + " &", flush=True)
    process = subprocess.Popen([sys.executable, *CLI, *command], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = next((line.partition(ready)[2].strip() for line in process.stdout if line.startswith(ready)), "")
        if not address:
            sys.exit(process.wait() or 1)
        yield address
    finally:
        process.terminate()
        process.wait()


def sample(model: Path, tasks: Path, answers: Path, count: int) -> None:
    """Write ``count`` answers of a model to each task: a file for ``headway kernels eval``."""
    rows: list[dict[str, str]] = []
    with serving("OPENAI_BASE_URL=", "serve", str(model), "--address", "127.0.0.1:0", "--context", "512") as address:
        for line in tasks.read_text(encoding="utf-8").splitlines():
            prompt = json.loads(line)["prompt"]
            body = {
                "model": "headway",
                "messages": [{"role": "user", "content": prompt}],
                "n": count,
                "temperature": 1,
            }
            headers = {"Content-Type": "application/json", "Authorization": "Bearer any"}
            request = urllib.request.Request(f"{address}/chat/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request) as response:
                choices = json.load(response)["choices"]
            rows += [{"task": prompt, "text": choice["message"]["content"] or ""} for choice in choices]
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def score(recipe: Recipe, name: str, model: Path, service: str, count: int) -> dict[str, Any]:
    """A model's scores on the held-out tasks, by ``headway kernels eval``; ``name``: of the report, ``count``: answers
    to each task."""
    folder = recipe.folder
    tasks, answers, out = folder / "tasks/heldout.jsonl", folder / f"{name}.answers.jsonl", folder / name
    if not out.with_suffix(".json").exists():
        sample(model, tasks, answers, count)
        files = ("--tasks", tasks, "--answers", answers, "--out", out, "--model", name)
        recipe.run("headway", "kernels", "eval", *files, "--addresses", service)
    return json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))


def table(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """The reports of ``headway kernels eval`` side by side."""
    lines = ["", f"{'held-out problems':<22} {'compiled':>8} {'correct':>8} {'fast_1':>8} {'median speed-up':>16}"]
    for name, report in reports.items():
        row, speedups = report["row"], report["scores"]["speedups"]
        median = f"{math.exp(speedups['quantiles']['0.5']):.2f} of {speedups['count']}" if speedups else "-"
        shares = (row[key][0] for key in ("compiled_pass@1", "correct_pass@1", "fast_1"))
        lines.append(f"{name:<22} " + " ".join(f"{share:8.3f}" for share in shares) + f" {median:>16}")
    return "\n".join(lines)


def prepare(recipe: Recipe, *sft: str) -> tuple[Path, list[str]]:
    """The cold start: its model, and the keys that name tasks and seed. ``sft``: further ones of `headway sft`."""
    make_tasks, initial = HERE / "make_tasks.py", SIZES.split()
    return recipe.cold_start(CONFIG, make_tasks, splits=("train",), initial=initial, template=TEMPLATE, sft=sft)


def main() -> None:
    options = {"sft_steps": (0, "of the cold start; default: sft.steps"), "answers": (16, "to each held-out task")}
    recipe = Recipe.from_arguments("kernels", __doc__, **options)
    steps, answers = recipe.options["sft_steps"], recipe.options["answers"]
    began_s = time.monotonic()
    model, keys = prepare(recipe, *([f"--sft.steps={steps}"] if steps else []))
    if recipe.options["cold_start_only"]:
        return
    with serving("HEADWAY_KERNELS=", "serve-kernels", *SERVICE.split()) as service:
        before = score(recipe, "cold-start", model, service, answers)
        rl = recipe.train(CONFIG, model, *keys, f'--environment.parameters.addresses=["{service}"]')
        after = score(recipe, "reinforced", rl / "best", service, answers)
    print(table({"after the cold start": before, "after RL": after}))
    print(f"{(time.monotonic() - began_s) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
