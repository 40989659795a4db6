"""What early pruning saves, and what it costs: recorded responses replayed with and without it.

    python benchmarks/pruning.py                     # five seeds, some seconds each
    python benchmarks/pruning.py --seeds 1 --steps 20

`pruning_load.jsonl` beside this file holds the responses of one live run without pruning (100 steps of 8 groups of 8,
no filter, on the quickstart's task): a line per group, of each response its tokens, whether it was solved, and where it
goes round in circles the token from which on and the period. Its cold start had been spoilt by demonstrations of which
half end in one sign 200 times, as models do that are hardly trained. How often such a model loops differs from one cold
start to the next (live, 0.19 to 0.37 of the tokens were saved); the recording is the same load on every start.

Each seed puts the recorded groups into another order (within tenths of the run) and draws other audits, and is run
twice, with `[pruning]` off and on (`PRUNING`): the real orchestrator, rules, buffer and ledger, in virtual time over
the stand-ins of generator, trainer and verifier. Nothing is learnt, so the load is the same with and without pruning.

Prints a line per run, a table of what was pruned with each rule's share, and as the last line one JSON object:

- `tokens_saved`: 1 - (response tokens per trained sample with pruning / without), from the ledgers, the mean over
  seeds, with its standard error and the least; `tokens_saved_estimated`: the same share as the pruned run
  alone knows it, from what its audits went on for.
- `reward_difference`: mean reward of the trained samples with pruning less without: what was solved in the end, and was
  cut before. A response that is cut in its circles keeps its reward, any other one has none.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
from parts.trained_run import standard_error

from headway.config import pruning as rules
from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.generator.fake import FakeGenerator
from headway.orchestrator.assembly import Actors, assemble
from headway.planner.simulate import drive
from headway.records.clients import Watch
from headway.records.generation import GenerationRequest, GenerationResult, PartialResponse
from headway.records.ledger import LedgerLine, PrunerFigures, StepRecord
from headway.records.task import Task
from headway.rollout.fake import FakeVerifier
from headway.runtime.clock import Clock, run_virtual
from headway.trainer.fake import FakeTrainer

LOAD = Path(__file__).with_name("pruning_load.jsonl")
SEEDS = (1, 2, 3, 4, 5)
GROUPS, SIZE = 8, 8  # of a step, of a group
LONGEST = 512  # tokens of a response
PRUNING: dict[str, Any] = {
    "pruners": [{"kind": "repetition", "repeats": 3}, {"kind": "relative_length", "times_median": 4}],
}
rules.EVERY_TOKENS = 8  # the responses are short: so are the loops, and what they are looked for in
rules.LONGEST_PERIOD, rules.LOOP_TOKENS, rules.WINDOW_TOKENS = 32, 24, 64
_STOP = 1  # ... and 2: the last token of an unsolved response, of a solved one
_PLAIN, _LOOP = 1000, 1_000_000  # the first ids of each kind; of odd ones the response was solved


class Response(NamedTuple):
    """One recorded response."""

    length: int  # tokens; LONGEST: it was cut there
    solved: int = 0
    loop_at: int = LONGEST  # the token from which on it repeats itself
    period: int = 1

    def ids(self, count: int) -> tuple[int, ...]:
        """Its first ``count`` tokens: no two alike but in its loop."""
        plain = min(count, self.loop_at)
        loop = [_LOOP + 2 * (at % self.period) + self.solved for at in range(count - plain)]
        ids = [_PLAIN + 2 * at + self.solved for at in range(plain)] + loop
        if count == self.length < LONGEST:
            ids[-1] = _STOP + self.solved
        return tuple(ids)

    def shown(self, partial: PartialResponse) -> PartialResponse:
        return msgspec.structs.replace(partial, ids=self.ids(len(partial.ids)))


class Codec:
    """A response decodes to its last token and its length, which tell its reward."""

    stop_ids = (_STOP, _STOP + 1)

    def render(self, prompt: object, template: str) -> tuple[int, ...]:
        return (3, 4)

    def decode(self, ids: Sequence[int]) -> str:
        return f"{ids[-1]} {len(ids)}"


def reward(task: Task, response: str) -> float:
    """Of a whole response, or of one cut in its loop, whether it was solved; of any other one that was cut 0."""
    last, length = map(int, response.split())
    if last in Codec.stop_ids:
        return float(last - _STOP)
    return float(last % 2) if last >= _LOOP or length >= LONGEST else 0.0


class Outcome(NamedTuple):
    """What one run came to."""

    reward: float  # of the trained samples
    tokens_per_sample: float  # response tokens of all rollouts that ended, trained or not / samples trained
    samples: int  # trained
    solve_rates: list[float]  # over tenths of the run
    pruning: dict[str, PrunerFigures]
    tokens: int  # response tokens of all rollouts that ended


def recorded(seed: int) -> list[list[Response]]:
    """The recorded groups, those of each tenth of the run in an order of the seed's."""
    groups = [[Response(*member) for member in json.loads(line)] for line in LOAD.read_text().splitlines()]
    tenth = len(groups) // 10
    parts = [groups[start : start + tenth] for start in range(0, len(groups), tenth)]
    for part in parts:
        random.Random(f"order {seed}").shuffle(part)
    return [group for part in parts for group in part]


def experiment_of(folder: str, seed: int, steps: int, pruned: bool) -> Experiment:
    raw = {
        "run": {"directory": folder, "seed": seed, "steps": steps},
        "model": {"path": "none"},
        "tasks": {"train": {"path": "none"}},
        "rollout": {"group_size": SIZE, "max_response_tokens": LONGEST},
        "generator": {"slots": 128},
        "queue": {"groups_per_step": GROUPS, "budget": 2, "filter_zero_variance": False},
        "evaluation": {"test": "never"},
        "checkpoint": {"every_steps": 1000},
        "pruning": PRUNING if pruned else {},
    }
    return validate_experiment(raw, "benchmarks/pruning.py")


def replay(directory: Path, seed: int, steps: int, pruned: bool) -> Outcome:
    """One run over the recorded responses, and a line about it."""
    started_s = time.monotonic()
    groups, lines, samples = recorded(seed), list[LedgerLine](), list[dict[str, Any]]()

    def response_of(request: GenerationRequest) -> Response:
        group, _, member = request.request_id.partition("-")
        return groups[int(group) % len(groups)][int(member.partition(".")[0])]

    def with_tokens(generate: Any) -> Any:
        async def replayed(request: GenerationRequest, watch: Watch | None = None) -> GenerationResult:
            response = response_of(request)
            told = watch and Watch(watch.every_tokens, lambda partial: watch.on_tokens(response.shown(partial)))
            result = await generate(request, told)
            return msgspec.structs.replace(result, response=response.shown(result.response))

        return replayed

    async def main(clock: Clock) -> None:
        def length_of(request: GenerationRequest) -> int:
            length = response_of(request).length
            return length if length < LONGEST else LONGEST + 1

        actors = Actors(
            generator=FakeGenerator(clock, slots=128, token_s=0.004, length_of=length_of),
            trainer=FakeTrainer(clock, 0.004),
            verifier=FakeVerifier(reward, clock),
            tokenizer=Codec(),
            train_tasks=[Task(task_id=str(number), prompt=str(number)) for number in range(1000)],
            record=lines.append,
            keep_sample=samples.append,
            wrap_generate=with_tokens,
        )
        with TemporaryDirectory(dir=directory) as folder, ExitStack() as stack:
            experiment = experiment_of(folder, seed, steps, pruned)
            await drive(assemble(experiment, actors, clock, Path(folder) / "buffer.db", stack))

    run_virtual(main, limit_s=1e9)
    outcome = outcome_of([line for line in lines if isinstance(line, StepRecord)], samples)
    curve = " ".join(f"{rate:.2f}" for rate in outcome.solve_rates)
    print(
        f"seed {seed}, {'pruned' if pruned else 'plain '}: reward {outcome.reward:.3f}, "
        f"{outcome.tokens_per_sample:.1f} response tokens per trained sample, {outcome.samples} samples, "
        f"{time.monotonic() - started_s:.0f} s   {curve}",
        flush=True,
    )
    return outcome


def outcome_of(steps: Sequence[StepRecord], kept: Sequence[dict[str, Any]]) -> Outcome:
    tenths = [steps[len(steps) * part // 10 : len(steps) * (part + 1) // 10] for part in range(10)]
    samples = sum(step.samples for step in steps)
    tokens = sum(sum(step.tokens.ended.values()) for step in steps)
    pruners = sorted({pruner for step in steps for pruner in step.pruning})
    return Outcome(
        reward=mean(float(sample["reward"]) for sample in kept),
        tokens_per_sample=tokens / samples,
        samples=samples,
        solve_rates=[mean(step.rewards.solve_rate for step in part if step.rewards) for part in tenths if part],
        pruning={
            pruner: PrunerFigures.total(step.pruning[pruner] for step in steps if pruner in step.pruning)
            for pruner in pruners
        },
        tokens=tokens,
    )


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: what each pruner did, over all seeds."""
    lines = [
        "| pruner | pruned rollouts | tokens saved each, estimated | share of all | audits | wrong | reward bias |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    pruners = sorted({pruner for outcome in outcomes for pruner in outcome.pruning})
    by = {pruner: PrunerFigures.total(o.pruning[pruner] for o in outcomes if pruner in o.pruning) for pruner in pruners}
    whole = sum(total.saving_tokens for total in by.values()) + sum(outcome.tokens for outcome in outcomes)
    for pruner, total in by.items():
        each = total.saving_tokens / total.rollouts if total.rollouts else 0.0
        lines.append(
            f"| {pruner} | {total.rollouts} | {each:.0f} | {total.saving_tokens / whole:.1%} | {total.audits} | "
            f"{total.wrong} ({total.wrong_rate:.1%}) | {total.reward_bias:+.4f} |"
        )
    return "\n".join(lines)


def result_of(plain: Sequence[Outcome], pruned: Sequence[Outcome]) -> dict[str, float | int | list[float]]:
    """The figures of the last line."""
    pairs = list(zip(plain, pruned, strict=True))
    saved = [1 - after.tokens_per_sample / before.tokens_per_sample for before, after in pairs]
    difference = [after.reward - before.reward for before, after in pairs]
    saved_tokens = [sum(figures.saving_tokens for figures in one.pruning.values()) for one in pruned]
    estimated = [more / (more + one.tokens) for more, one in zip(saved_tokens, pruned, strict=True)]
    total = PrunerFigures.total(figures for one in pruned for figures in one.pruning.values())
    return {
        "tokens_saved": round(mean(saved), 4),
        "tokens_saved_standard_error": round(standard_error(saved), 4),
        "tokens_saved_least": round(min(saved), 4),
        "tokens_saved_estimated": round(mean(estimated), 4),
        "reward_difference": round(mean(difference), 4),
        "reward_difference_standard_error": round(standard_error(difference), 4),
        "reward_difference_by_seed": [round(value, 4) for value in difference],
        "reward_plain": round(mean(one.reward for one in plain), 4),
        "reward_pruned": round(mean(one.reward for one in pruned), 4),
        "wrong_prune_rate": round(total.wrong_rate, 4),
        "audits": total.audits,
        "reward_bias": round(total.reward_bias, 4),
        "seeds": len(pairs),
        "samples": plain[0].samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=100, help="of 8 groups of 8; at most 100 are recorded")
    parser.add_argument("--directory", type=Path, default=Path("runs/benchmark-pruning"))
    arguments = parser.parse_args()
    if not 1 <= arguments.steps <= 100:
        parser.error(f"--steps {arguments.steps}: valid: 1 to 100, as many are recorded")
    arguments.directory.mkdir(parents=True, exist_ok=True)
    plain: list[Outcome] = []
    pruned: list[Outcome] = []
    for seed in arguments.seeds:
        plain.append(replay(arguments.directory, seed, arguments.steps, pruned=False))
        pruned.append(replay(arguments.directory, seed, arguments.steps, pruned=True))
    print("\n" + table(pruned) + "\n")
    print(json.dumps(result_of(plain, pruned)))


if __name__ == "__main__":
    main()
