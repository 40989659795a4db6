"""Kernel tasks, a random model, a supervised cold start, RL by what a kernel service measures, scores before and after.

    python examples/kernels/run.py --seed 0

Runs each step by the command a user would type, prints it, and skips what an earlier run of the same seed has done. The
kernel service has core 1 to itself for timing; everything else is on core 0.
"""

from __future__ import annotations

import argparse
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

HERE = Path(__file__).resolve().parent
CLI = ("-m", "headway.cli.main")
TEMPLATE = """\
{%- for message in messages -%}
{{- message.content + ('<|eos|>' if message.role == 'assistant' else '\\n') -}}
{%- endfor -%}"""


def run(*command: str) -> None:
    """Print and run one command; end with its exit code when it fails."""
    print("\n$ " + " ".join(("headway", *command[2:]) if command[:2] == CLI else ("python", *command)), flush=True)
    code = subprocess.run([sys.executable, *command]).returncode
    if code:
        sys.exit(code)


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


def score(name: str, model: Path, folder: Path, service: str, count: int = 16) -> dict[str, Any]:
    """A model's scores on the held-out tasks, by ``headway kernels eval``; ``name``: of the report, ``count``: answers
    to each task."""
    tasks, answers, out = folder / "tasks/heldout.jsonl", folder / f"{name}.answers.jsonl", folder / name
    if not out.with_suffix(".json").exists():
        sample(model, tasks, answers, count)
        files = ("--tasks", str(tasks), "--answers", str(answers), "--out", str(out), "--model", name)
        run(*CLI, "kernels", "eval", *files, "--addresses", service)
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


def prepare(folder: Path, seed: int, *sft: str) -> list[str]:
    """Tasks, a random model and its cold start in ``folder``; the overrides that name its files. ``sft``: further
    arguments of ``headway sft``."""
    config, tasks, initial, warm = (
        os.path.relpath(HERE / "experiment.toml"),
        folder / "tasks",
        folder / "init",
        folder / "sft",
    )
    paths = [f"--tasks.train.path={tasks}/train.jsonl", f"--run.seed={seed}"]
    if not (tasks / "heldout.jsonl").exists():
        run(str(HERE / "make_tasks.py"), str(tasks), "--seed", str(seed))
    if not initial.exists():
        texts = (
            "--texts",
            f"{tasks}/sft.jsonl",
            "--vocabulary-size",
            "640",
            "--layers",
            "4",
            "--width",
            "128",
            "--intermediate",
            "352",
        )
        run(*CLI, "init-model", str(initial), *texts, "--seed", str(seed))
        (initial / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    if not warm.exists():
        files = [f"--model.path={initial}", f"--sft.data={tasks}/sft.jsonl", f"--sft.output={warm}"]
        run(*CLI, "sft", config, *files, *paths, *sft)
    return [f"--model.path={warm}", *paths]


def train(rl: Path, paths: list[str], service: str, *overrides: str) -> Path:
    """Train by RL in the folder ``rl``, unless that was done; the trained model."""
    config = os.path.relpath(HERE / "experiment.toml")
    done = (rl / "summary.json").exists() and json.loads((rl / "summary.json").read_text())["finished"]
    if not done:
        resume = ["--resume"] if (rl / "config.json").exists() else []
        places = [f"--run.directory={rl}", f'--environment.parameters.addresses=["{service}"]']
        run(*CLI, "train", config, *resume, *paths, *places, *overrides)
    run(*CLI, "report", str(rl))
    return rl / "best"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of tasks, model, cold start and RL")
    parser.add_argument("--directory", type=Path, help="default: runs/kernels-SEED")
    parser.add_argument("--sft-steps", type=int, help="of the cold start; default: sft.steps")
    parser.add_argument("--answers", type=int, default=16, metavar="N", help="to each held-out task, for the scores")
    arguments, overrides = parser.parse_known_args()
    folder: Path = arguments.directory or Path(f"runs/kernels-{arguments.seed}")
    began_s = time.monotonic()
    paths = prepare(folder, arguments.seed, *([f"--sft.steps={arguments.sft_steps}"] if arguments.sft_steps else []))
    with serving(
        "HEADWAY_KERNELS=", "serve-kernels", "--port", "0", "--cores", "1", "--timing-s", "0.25", "--concurrency", "2"
    ) as service:
        before = score("cold-start", folder / "sft", folder, service, arguments.answers)
        trained = train(folder / "rl", paths, service, *overrides)
        after = score("reinforced", trained, folder, service, arguments.answers)
    print(table({"after the cold start": before, "after RL": after}))
    print(f"{(time.monotonic() - began_s) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
