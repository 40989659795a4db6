"""The cold start of examples/arithmetic, a chat template for its model, and RL of the agent beside this file.

    python examples/agent/run.py --seed 0

The model has learned to go on from "19+8-3=" and knows no roles, so its chat template joins the messages as they are.
"""

from __future__ import annotations

from pathlib import Path

from headway.api import Recipe

HERE = Path(__file__).resolve().parent
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{{ '<|eos|>' if loop.last and message.role == 'assistant' }}{% endfor %}"
)


def main() -> None:
    recipe = Recipe.from_arguments("agent", __doc__)
    model, keys = recipe.quickstart(TEMPLATE)
    if not recipe.options["cold_start_only"]:
        recipe.train(HERE / "experiment.toml", model, *keys)


if __name__ == "__main__":
    main()
