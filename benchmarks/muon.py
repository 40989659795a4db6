"""In how many steps does Muon reach the loss of AdamW?

    python benchmarks/muon.py                          # everything; again: goes on where it stopped
    python benchmarks/muon.py --seeds 0 --epochs 2

For each seed `headway sft` trains the quickstart's random model on its demonstrations for EPOCHS by AdamW, and for
shares of these steps by Muon, each with its complete schedule and at the best of five learning rates, RATES times the
quickstart's. Compared is the mean cross-entropy on a twentieth of the demonstrations, which neither is trained on. Muon
begins at SHARES' first at all rates, and goes on to smaller ones at its best rate, so that only the first is tuned.

Prints a line a run, and as the last line one JSON object: `muon_steps_over_adamw` (median over seeds of the share of
AdamW's steps at which Muon's loss, interpolated between shares, is AdamW's; null if some seed's never is), `range`,
`losses` (AdamW's, and Muon's at SHARES' first) and `rates` of each seed. Two optimisers see equal batches of a seed.
Timing plays no part.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import NamedTuple

from parts.trained_run import ARITHMETIC, NO_TIME_LIMIT, headway

CONFIG = ARITHMETIC / "experiment.toml"
PEAK = 5e-3  # the quickstart's learning rate
RATES = (0.25, 0.5, 1.0, 2.0, 4.0)
SHARES = (0.9, 0.75, 0.6, 0.5, 0.4, 0.3)
FAILED = float("inf")  # loss of a run whose gradients weren't finite


class Comparison(NamedTuple):
    """One seed's losses, nats a token, and the rates that they are of; ``share``: of AdamW's steps."""

    share: float | None
    losses: tuple[float, float]
    rates: tuple[float, float]


class Sft:
    """`headway sft` of one seed's demonstrations, each setting once."""

    def __init__(self, directory: Path, seed: int, epochs: float) -> None:
        self._folder, self._seed, self._epochs = directory / f"sft-{seed}", seed, epochs
        tasks, init = self._folder / "tasks", self._folder / "init"
        if not tasks.exists():
            make_tasks = [sys.executable, str(ARITHMETIC / "make_tasks.py"), str(tasks), "--seed", str(seed)]
            subprocess.run(make_tasks, check=True)
        if not init.exists():
            headway("init-model", str(init), "--texts", str(tasks / "sft.jsonl"), "--seed", str(seed))
        # the quickstart's, with an end by epochs, which holds demonstrations out
        ends = r"(?m)^(steps = 1800|evaluate_every_steps|stop_at_solve_rate = 0.42).*\n"
        config = re.sub(ends, "", CONFIG.read_text(encoding="utf-8"))
        (self._folder / "experiment.toml").write_text(config, encoding="utf-8")

    def loss(self, optimizer: str, rate: float, share: float = 1.0) -> float:
        """The held-out loss after ``share`` of the epochs."""
        name = f"{optimizer}-{rate:g}-{self._epochs * share:g}"
        output, report = self._folder / name, self._folder / f"{name}.json"
        if not report.exists():
            data, epochs = self._folder / "tasks" / "sft.jsonl", self._epochs * share
            sft = {"data": data, "output": output, "epochs": epochs, "learning_rate": rate}
            options = [f"--model.path={self._folder}/init", f"--trainer.optimizer={optimizer}"]
            options += [NO_TIME_LIMIT]
            options += [f"--sft.{key}={value}" for key, value in sft.items()]
            config = str(self._folder / "experiment.toml")
            command = [sys.executable, "-m", "headway.cli.main", "sft", config, "--json", "--quiet"]
            arguments = [*options, f"--run.seed={self._seed}"]
            finished = subprocess.run([*command, *arguments], check=False, stdout=subprocess.PIPE, text=True)
            if finished.returncode == 2:
                raise SystemExit(2)
            report.write_text(finished.stdout if finished.returncode == 0 else "{}", encoding="utf-8")
        loss = json.loads(report.read_text(encoding="utf-8")).get("held_out_loss", FAILED)
        print(f"seed {self._seed}: {optimizer} at {rate:g}, {share:g} of the steps: {loss:.5f}", flush=True)
        return loss

    def best(self, optimizer: str, share: float = 1.0) -> tuple[float, float]:
        """The lowest loss over the rates, and its rate."""
        return min((self.loss(optimizer, PEAK * rate, share), PEAK * rate) for rate in RATES)

    def compared(self) -> Comparison:
        """The share of AdamW's steps that Muon needs."""
        target, adamw_rate = self.best("adamw")
        first, *smaller = SHARES
        loss, muon_rate = muon_best = self.best("muon", first)
        share: float | None = None
        if loss <= target:
            share = first
            for shorter in smaller:
                shorter_loss = self.loss("muon", muon_rate, shorter)
                if shorter_loss > target:
                    share -= (share - shorter) * (target - loss) / (shorter_loss - loss)
                    break
                share, loss = shorter, shorter_loss
        return Comparison(share, (target, muon_best[0]), (adamw_rate, muon_rate))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path("runs/benchmark-muon"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--epochs", type=float, default=1.0, help="of AdamW; the quickstart's at most 6.2")
    arguments = parser.parse_args()
    directory: Path = arguments.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    by_seed = {seed: Sft(directory, seed, arguments.epochs).compared() for seed in arguments.seeds}
    shares = [comparison.share for comparison in by_seed.values()]
    reached = [share for share in shares if share is not None]
    figures = {
        "muon_steps_over_adamw": median(reached) if len(reached) == len(shares) else None,
        "range": [min(reached), max(reached)] if reached else None,
        "losses": {seed: comparison.losses for seed, comparison in by_seed.items()},
        "rates": {seed: comparison.rates for seed, comparison in by_seed.items()},
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
