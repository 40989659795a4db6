"""The cold start of examples/arithmetic, a chat template for its model, and RL in the environment beside this file.

    pip install 'headway[verifiers]'
    python examples/verifiers/run.py

The model has learned to go on from "19+8-3=" and knows no roles, so its chat template joins the messages as they are.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from headway.api import Recipe

HERE = Path(__file__).resolve().parent
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{{ '<|eos|>' if loop.last and message.role == 'assistant' }}{% endfor %}"
)


def main() -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    recipe = Recipe("runs/verifiers", overrides=sys.argv[1:])
    model, _ = recipe.quickstart(TEMPLATE)
    recipe.train(HERE / "experiment.toml", model)


if __name__ == "__main__":
    main()
