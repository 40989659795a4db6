"""The cold start of examples/arithmetic, then PPO with a critic and rewards by step.

    python examples/checked_steps/run.py --seed 0

From the root of the repository, which steps.py beside this file is imported from.
"""

from __future__ import annotations

from pathlib import Path

from headway.api import Recipe

HERE = Path(__file__).resolve().parent


def main() -> None:
    recipe = Recipe.from_arguments("checked_steps", __doc__)
    recipe.run("headway", "quickstart", recipe.folder, "--seed", recipe.seed, "--cold-start-only")
    if not recipe.options["cold_start_only"]:
        recipe.train(HERE / "experiment.toml", recipe.folder / "sft", f"--run.seed={recipe.seed}")


if __name__ == "__main__":
    main()
