"""Trains the model of examples/kernels by GRPO, GSPO, TIS and DAPO, and prints their scores on held-out problems.

    python examples/kernels/algorithms.py --directory runs/kernels-0 --run.steps=60

Each objective starts from the same cold start, which it makes if there is none. All other arguments are given to
``headway train``.
"""

from __future__ import annotations

import sys

from run import CONFIG, prepare, score, serving, table

from headway.api import Recipe

OBJECTIVES = {
    "GRPO": ("--algorithm.preset=grpo",),
    "GSPO": ("--algorithm.preset=gspo", "--algorithm.loss=gspo"),
    # importance weights of the behaviour policy, truncated at 2
    "TIS": ("--algorithm.loss=decoupled_ppo", "--algorithm.behaviour_weight_cap=2"),
    # kernel answers may have several turns, which have no common limit for a penalty to rise to
    "DAPO": ("--algorithm.preset=dapo", "--algorithm.overlong=mask"),
}


def main() -> None:
    options = {
        "only": (",".join(OBJECTIVES), "objectives, separated by commas"),
        "answers": (16, "to each held-out task"),
    }
    recipe = Recipe.from_arguments("kernels", __doc__, **options)
    names, answers = recipe.options["only"].split(","), recipe.options["answers"]
    if unknown := [name for name in names if name not in OBJECTIVES]:
        sys.exit(f"--only {','.join(unknown)}: valid: {', '.join(OBJECTIVES)}")
    model, keys = prepare(recipe)
    if recipe.options["cold_start_only"]:
        return
    with serving("HEADWAY_KERNELS=", "serve-kernels", "--port", "0", "--cores", "1") as service:
        reports = {"cold start": score(recipe, "cold-start", model, service, answers)}
        for name in names:
            keys_of = (*keys, f'--environment.parameters.addresses=["{service}"]', *OBJECTIVES[name])
            trained = recipe.train(CONFIG, model, *keys_of, name=name.lower()) / "best"
            reports[name] = score(recipe, name.lower() + "-trained", trained, service, answers)
    print(table(reports))


if __name__ == "__main__":
    main()
