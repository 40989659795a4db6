"""`headway show` prints the recorded rollouts of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from headway.records.errors import ConfigurationError
from headway.records.rollout import Failure, Pruned
from headway.report.formats import duration
from headway.telemetry.rollouts.joined import Decode, JoinedRollouts


class RecordedSample(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout of a run's record, as `headway show` prints it."""

    step: int | None  # trainer version before the step that trained it; None: it wasn't trained
    group: int
    member: int
    prompt: str
    response: str
    reward: float
    solved: bool
    advantage: float | None  # mean over its sampled tokens; None: the trainer recorded none
    value: float | None  # of the critic at the start of the step, mean over its loss tokens; None: there is none
    versions: list[tuple[int, int]]  # (version, tokens) spans of the response
    finish_reason: str
    ending: str
    failure: Failure | None  # cause and boundary
    pruned: Pruned | None  # ended early, or audited
    calls: list[tuple[float, float, float, int]]  # model calls, with the fields of CallTimes
    tools: list[tuple[str, float, float, bool]]  # tool calls of its environment, with the fields of ToolTimes

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.versions)


class SampleSelection(msgspec.Struct, frozen=True, kw_only=True):
    """Filters that choose the rollouts to print; None doesn't filter."""

    step: int | None = None
    group: int | None = None
    solved: bool | None = None
    ending: str | None = None
    limit: int | None = None  # at most this many, the newest

    def matches(self, *, step: int | None, group: int, solved: bool, ending: str) -> bool:
        """Return whether a rollout with these properties passes the filters."""
        return (
            self.step in (None, step)
            and self.group in (None, group)
            and self.solved in (None, solved)
            and self.ending in (None, ending)
        )


class RecordedSamples:
    """The rollouts that a run has recorded, oldest first; each is read when it is needed."""

    def __init__(self, run_dir: str | Path, decode: Decode | None = None) -> None:
        """Open the record. ``decode``: the tokenizer's. Raises ConfigurationError when the run recorded no rollouts."""
        self._rollouts = JoinedRollouts(run_dir, decode)
        if not self._rollouts.record.exists():
            reason = f"there is no {self._rollouts.record.folder}"
            hint = "ledger.rollouts may be none, or no rollout was finished yet"
            raise ConfigurationError(f"{run_dir} holds no rollouts: {reason} ({hint})")

    def select(self, selection: SampleSelection) -> tuple[list[int], list[int]]:
        """Return the rows of the selected rollouts, and all steps in which rollouts were trained."""
        chosen_rows: list[int] = []
        steps: set[int | None] = set()
        for start, batch in self._rollouts.record.batches(["group", "solved", "removal", "removal_reason", "failure"]):
            for row, rollout in enumerate(batch.to_pylist(), start=start):
                ending, _, step = self._rollouts.end_of(rollout)
                steps.add(step)
                if selection.matches(step=step, group=rollout["group"], solved=rollout["solved"], ending=ending):
                    chosen_rows.append(row)
        return chosen_rows if selection.limit is None else chosen_rows[-selection.limit :], sorted(
            step for step in steps if step is not None
        )

    def read(self, chosen: Iterable[int]) -> Iterator[RecordedSample]:
        """Yield the rollouts in these rows, in order."""
        for row in chosen:
            for batch in self._rollouts.batches(row, row + 1):
                yield _sample_of(batch.to_pylist()[0])


def _sample_of(row: dict[str, Any]) -> RecordedSample:
    unread_text = "({} tokens: the run's tokenizer can't be read)"
    return RecordedSample(
        step=row["step"],
        group=row["group"],
        member=row["member"],
        prompt=unread_text.format(len(row["prompt_ids"])) if row["prompt"] is None else row["prompt"],
        response=unread_text.format(len(row["response_ids"])) if row["response"] is None else row["response"],
        reward=row["reward"],
        solved=row["solved"],
        advantage=_mean(row, "advantages"),
        value=_mean(row, "values"),
        versions=list(zip(row["span_versions"], row["span_tokens"], strict=True)),
        finish_reason=row["finish_reason"],
        ending=row["ending"],
        failure=None if row["failure"] is None else msgspec.json.decode(row["failure"], type=Failure),
        pruned=None if row["pruned"] is None else msgspec.json.decode(row["pruned"], type=Pruned),
        calls=_zip_columns(row, "call_starts_s", "call_first_tokens_s", "call_ends_s", "call_tokens"),
        tools=_zip_columns(row, "tool_names", "tool_starts_s", "tool_ends_s", "tool_errors"),
    )


def _mean(row: dict[str, Any], name: str) -> float | None:
    """The mean of a trainer's column over the sampled tokens that have a number; None: there are none, or no column."""
    column = row[f"trainer_{name}"]
    values = [value for value, sampled in zip(column or (), row["response_mask"], strict=False) if sampled]
    numbers = np.array(values, np.float64)
    numbers = numbers[np.isfinite(numbers)]
    return round(float(numbers.mean()), 6) if len(numbers) else None


def _zip_columns(row: dict[str, Any], *names: str) -> list[Any]:
    return list(zip(*(row[name] for name in names), strict=True))


def show_samples(
    run_dir: str | Path,
    selection: SampleSelection,
    *,
    decode: Decode | None = None,
    as_json: bool = False,
    console: Console | None = None,
) -> None:
    """Print the selected rollouts, on a terminal through its pager. Raises ConfigurationError when none matches."""
    samples = RecordedSamples(run_dir, decode)
    chosen_rows, steps = samples.select(selection)
    if as_json:
        for sample in samples.read(chosen_rows):
            sys.stdout.write(msgspec.json.encode(sample).decode() + "\n")
        return
    if not chosen_rows:
        held_text = f"it holds steps {steps[0]} to {steps[-1]}" if steps else "no step has been trained"
        raise ConfigurationError(f"no rollout matches; {held_text}")
    console = console or Console(highlight=False)
    with console.pager(styles=True) if console.is_terminal else nullcontext():
        for panel in _panels(samples.read(chosen_rows), len(chosen_rows)):
            console.print(panel)


def _panels(samples: Iterable[RecordedSample], count: int) -> Iterator[Panel]:
    for position, sample in enumerate(samples, start=1):
        step_text = "no step" if sample.step is None else f"step {sample.step}"
        title = Text(f"{position}/{count} · {step_text} · group {sample.group}, member {sample.member}")
        yield Panel(_body(sample), title=title, title_align="left", border_style="green" if sample.solved else "red")


def _body(sample: RecordedSample) -> Text:
    body = Text()
    advantage_text = "" if sample.advantage is None else f" · advantage {sample.advantage:+.3f}"
    value_text = "" if sample.value is None else f" · value {sample.value:.3f}"
    body.append("solved" if sample.solved else "not solved", style="bold green" if sample.solved else "bold red")
    body.append(
        f" · reward {sample.reward:g}{advantage_text}{value_text} · {sample.tokens} tokens · "
        f"{_versions(sample)} · finish {sample.finish_reason} · {sample.ending}\n\n",
        style="dim",
    )
    if sample.calls or sample.tools:
        body.append(_times(sample) + "\n\n", style="dim")
    if sample.failure is not None:
        body.append(visible(f"failed at the {sample.failure.boundary}: {sample.failure.cause}") + "\n\n", style="red")
    if sample.pruned is not None:
        body.append(_pruned(sample.pruned) + "\n\n", style="yellow")
    body.append("prompt\n", style="bold cyan")
    body.append(visible(sample.prompt) + "\n\n")
    body.append("response\n", style="bold cyan")
    body.append(visible(sample.response))
    return body


def _versions(sample: RecordedSample) -> str:
    if not sample.versions:
        return "no version"
    spans = ", ".join(f"{version} (×{tokens})" for version, tokens in sample.versions)
    noun = "version" if len(sample.versions) == 1 else "versions"
    return f"{noun} {spans}" + ("" if sample.step is None else f", staleness {sample.step - sample.versions[0][0]}")


def _times(sample: RecordedSample) -> str:
    """List the rollout's model calls and tool calls in order, with their durations."""
    rows = [(start_s, end_s, f"call of {tokens} tokens", False) for start_s, _, end_s, tokens in sample.calls]
    rows += [(start_s, end_s, visible(name) or "unknown tool", error) for name, start_s, end_s, error in sample.tools]
    parts = [f"{text} {duration(end_s - start_s)}" + " (error)" * error for start_s, end_s, text, error in sorted(rows)]
    return " · ".join(parts)


def _pruned(pruned: Pruned) -> str:
    description = f"by {pruned.pruner} at {pruned.at_tokens} tokens: {pruned.reason}"
    if not pruned.audited:
        return f"pruned {description}; about {pruned.saved_tokens:.0f} tokens saved"
    reward_text = "" if pruned.cut_reward is None else f"; pruning would have given {pruned.cut_reward:g}"
    return f"audited, else pruned {description}{reward_text}"


def visible(text: str) -> str:
    """Escape the control characters in ``text``, so that a model's output can't control the terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)
