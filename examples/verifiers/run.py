"""The cold start of examples/arithmetic, a chat template for its model, and RL in the environment beside this file.

    pip install 'headway[verifiers]'
    python examples/verifiers/run.py

The model has learned to go on from "19+8-3=" and knows no roles, so its chat template joins the messages as they are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = Path("runs/verifiers")
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{{ '<|eos|>' if loop.last and message.role == 'assistant' }}{% endfor %}"
)


def run(*command: str) -> None:
    print("\n$ " + " ".join(command), flush=True)
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    code = subprocess.run([sys.executable, *command], env={**os.environ, "PYTHONPATH": path}).returncode
    if code:
        sys.exit(code)


def main() -> None:
    run("-m", "headway.cli.main", "quickstart", str(FOLDER), "--cold-start-only")
    if not (FOLDER / "chat").exists():
        shutil.copytree(FOLDER / "sft", FOLDER / "chat")
        (FOLDER / "chat" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    run("-m", "headway.cli.main", "train", str(HERE / "experiment.toml"), *sys.argv[1:])
    run("-m", "headway.cli.main", "report", str(FOLDER / "rl"))


if __name__ == "__main__":
    main()
