"""The cold start of examples/arithmetic, then RL on the rollouts of workers that know nothing of Headway but HTTP.

python examples/buffer_client/run.py --seed 0 --workers 8 --node 2
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
ADDRESS = "127.0.0.1:8123"


def run(*command: str) -> None:
    print("\n$ " + " ".join(command), flush=True)
    code = subprocess.run([sys.executable, *command]).returncode
    if code:
        sys.exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of tasks, model, cold start and RL")
    parser.add_argument("--directory", type=Path, help="default: runs/buffer_client-SEED")
    parser.add_argument("--workers", type=int, default=8, help="processes of client.py")
    parser.add_argument("--node", type=int, default=0, help="processes of client.mjs")
    parser.add_argument("--model-only", action="store_true", help="stop before RL: tasks and model are made")
    arguments, overrides = parser.parse_known_args()
    folder: Path = arguments.directory or Path(f"runs/buffer_client-{arguments.seed}")
    seed = str(arguments.seed)
    run("-m", "headway.cli.main", "quickstart", str(folder), "--seed", seed, "--cold-start-only")
    model = folder / "chat"
    if not model.exists():
        shutil.copytree(folder / "sft", model)
        (model / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    if arguments.model_only:
        return
    commands = [[sys.executable, str(HERE / "client.py")]] * arguments.workers
    commands += [["node", str(HERE / "client.mjs")]] * arguments.node
    workers = [subprocess.Popen([*command, f"http://{ADDRESS}"]) for command in commands]
    try:
        places = [f"--model.path={model}", f"--run.directory={folder}/rl", f"--endpoint.address={ADDRESS}"]
        tasks = f"--tasks.train.path={folder}/tasks/train.jsonl"
        config = str(HERE / "experiment.toml")
        run("-m", "headway.cli.main", "serve-buffer", config, *places, tasks, f"--run.seed={seed}", *overrides)
    finally:
        for worker in workers:
            worker.kill()
    run("-m", "headway.cli.main", "report", str(folder / "rl"))


if __name__ == "__main__":
    main()
