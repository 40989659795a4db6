"""Trains the model of examples/kernels by GRPO, GSPO, TIS and DAPO, and prints their scores on held-out problems.

    python examples/kernels/algorithms.py --directory runs/kernels-0 --run.steps=60

Each objective starts from the same cold start, which it makes if there is none. All other arguments are given to
``headway train``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from run import prepare, score, serving, table, train

OBJECTIVES = {
    "GRPO": ("--algorithm.preset=grpo",),
    "GSPO": ("--algorithm.preset=gspo", "--algorithm.loss=gspo"),
    # importance weights of the behaviour policy, truncated at 2
    "TIS": ("--algorithm.loss=decoupled_ppo", "--algorithm.behaviour_weight_cap=2"),
    # kernel answers may have several turns, which have no common limit for a penalty to rise to
    "DAPO": ("--algorithm.preset=dapo", "--algorithm.overlong=mask"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="default: runs/kernels-SEED")
    parser.add_argument("--only", nargs="*", choices=OBJECTIVES, default=list(OBJECTIVES))
    arguments, overrides = parser.parse_known_args()
    folder: Path = arguments.directory or Path(f"runs/kernels-{arguments.seed}")
    paths = prepare(folder, arguments.seed)
    with serving("HEADWAY_KERNELS=", "serve-kernels", "--port", "0", "--cores", "1") as service:
        reports = {"cold start": score("cold-start", folder / "sft", folder, service)}
        for name in arguments.only:
            trained = train(folder / name.lower(), paths, service, *OBJECTIVES[name], *overrides)
            reports[name] = score(name.lower() + "-trained", trained, folder, service)
    print(table(reports))


if __name__ == "__main__":
    main()
