"""The cold start of examples/arithmetic, then RL on the rollouts of workers that know nothing of Headway but HTTP.

python examples/buffer_client/run.py --seed 0 --workers 8 --node 2
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from headway.api import Recipe

HERE = Path(__file__).resolve().parent
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{{ '<|eos|>' if loop.last and message.role == 'assistant' }}{% endfor %}"
)
ADDRESS = "127.0.0.1:8123"


def main() -> None:
    recipe = Recipe.from_arguments(
        "buffer_client",
        __doc__,
        workers=(8, "processes of client.py"),
        node=(0, "processes of client.mjs"),
        model_only=(False, "stop before RL: tasks and model are made"),
    )
    model, keys = recipe.quickstart(TEMPLATE)
    if recipe.options["model_only"]:
        return
    commands = [[sys.executable, str(HERE / "client.py")]] * recipe.options["workers"]
    commands += [["node", str(HERE / "client.mjs")]] * recipe.options["node"]
    workers = [subprocess.Popen([*command, f"http://{ADDRESS}"]) for command in commands]
    try:
        keys = [key for key in keys if "validation" not in key]
        recipe.train(HERE / "experiment.toml", model, f"--endpoint.address={ADDRESS}", *keys, command="serve-buffer")
    finally:
        for worker in workers:
            worker.kill()


if __name__ == "__main__":
    main()
