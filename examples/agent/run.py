"""The cold start of examples/arithmetic, a chat template for its model, and RL of the agent beside this file.

    python examples/agent/run.py --seed 0

The model has learned to go on from "19+8-3=" and knows no roles, so its chat template joins the messages as they are.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{{ '<|eos|>' if loop.last and message.role == 'assistant' }}{% endfor %}"
)


def run(*command: str) -> None:
    print("\n$ " + " ".join(command), flush=True)
    code = subprocess.run([sys.executable, *command]).returncode
    if code:
        sys.exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of tasks, model, cold start and RL")
    parser.add_argument("--directory", type=Path, help="default: runs/agent-SEED")
    arguments, overrides = parser.parse_known_args()
    folder: Path = arguments.directory or Path(f"runs/agent-{arguments.seed}")
    seed = str(arguments.seed)
    run("-m", "headway.cli.main", "quickstart", str(folder), "--seed", seed, "--cold-start-only")
    model = folder / "chat"
    if not model.exists():
        shutil.copytree(folder / "sft", model)
        (model / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    paths = [f"--tasks.{name}.path={folder}/tasks/{name}.jsonl" for name in ("train", "validation")]
    places = [f"--model.path={model}", f"--run.directory={folder}/rl"]
    config = str(HERE / "experiment.toml")
    run("-m", "headway.cli.main", "train", config, *places, *paths, f"--run.seed={seed}", *overrides)
    run("-m", "headway.cli.main", "report", str(folder / "rl"))


if __name__ == "__main__":
    main()
