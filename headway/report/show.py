"""`headway show`: the rollouts of a run, one by one."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from headway.records.errors import ConfigurationError
from headway.records.rollout import Failure, Pruned
from headway.report.formats import duration
from headway.telemetry.rollouts.joined import Decode, JoinedRollouts


class KeptSample(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout of a run's record, as `headway show` prints it."""

    step: int | None  # trainer version before the step that trained it; None: none did
    group: int
    member: int
    prompt: str
    response: str
    reward: float
    solved: bool
    advantage: float | None  # None: the trainer recorded none
    versions: list[tuple[int, int]]  # (version, tokens) spans of the response
    finish_reason: str
    ending: str
    failure: Failure | None  # why it failed, and where
    pruned: Pruned | None  # ended early, or audited
    calls: list[tuple[float, float, float, int]]  # its model calls, as CallTimes has them
    tools: list[tuple[str, float, float, bool]]  # what its environment did, as ToolTimes has it

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.versions)


class SampleSelection(msgspec.Struct, frozen=True, kw_only=True):
    """Which rollouts to show; None doesn't filter."""

    step: int | None = None
    group: int | None = None
    solved: bool | None = None
    ending: str | None = None
    limit: int | None = None  # at most this many, the newest

    def takes(self, *, step: int | None, group: int, solved: bool, ending: str) -> bool:
        """Whether a rollout with these properties is shown."""
        return (
            self.step in (None, step)
            and self.group in (None, group)
            and self.solved in (None, solved)
            and self.ending in (None, ending)
        )


class KeptSamples:
    """The rollouts that a run has kept, oldest first; each is read when it is shown."""

    def __init__(self, run_dir: str | Path, decode: Decode | None = None) -> None:
        """``decode``: the tokenizer's. Raises ConfigurationError when the run kept none."""
        self._rollouts = JoinedRollouts(run_dir, decode)
        if not self._rollouts.record.exists():
            said = f"there is no {self._rollouts.record.folder}"
            hint = "ledger.rollouts may be none, or no rollout was finished yet"
            raise ConfigurationError(f"{run_dir} holds no rollouts: {said} ({hint})")

    def select(self, selection: SampleSelection) -> tuple[list[int], list[int]]:
        """The rows of the rollouts that are chosen, and all steps that rollouts were trained in."""
        chosen: list[int] = []
        steps: set[int | None] = set()
        for start, batch in self._rollouts.record.batches(["group", "solved", "left", "left_reason", "failure"]):
            for row, one in enumerate(batch.to_pylist(), start=start):
                ending, _, step = self._rollouts.end_of(one)
                steps.add(step)
                if selection.takes(step=step, group=one["group"], solved=one["solved"], ending=ending):
                    chosen.append(row)
        return chosen if selection.limit is None else chosen[-selection.limit :], sorted(
            step for step in steps if step is not None
        )

    def read(self, chosen: Iterable[int]) -> Iterator[KeptSample]:
        """The rollouts in these rows, one after another."""
        for row in chosen:
            for batch in self._rollouts.batches(row, row + 1):
                yield _sample_of(batch.to_pylist()[0])


def _sample_of(row: dict[str, Any]) -> KeptSample:
    advantages = row["trainer_advantages"]
    unread = "({} tokens: the run's tokenizer can't be read)"
    return KeptSample(
        step=row["step"],
        group=row["group"],
        member=row["member"],
        prompt=unread.format(len(row["prompt_ids"])) if row["prompt"] is None else row["prompt"],
        response=unread.format(len(row["response_ids"])) if row["response"] is None else row["response"],
        reward=row["reward"],
        solved=row["solved"],
        advantage=round(sum(advantages) / len(advantages), 6) if advantages else None,
        versions=list(zip(row["span_versions"], row["span_tokens"], strict=True)),
        finish_reason=row["finish_reason"],
        ending=row["ending"],
        failure=None if row["failure"] is None else msgspec.json.decode(row["failure"], type=Failure),
        pruned=None if row["pruned"] is None else msgspec.json.decode(row["pruned"], type=Pruned),
        calls=_entries(row, "call_starts_s", "call_first_tokens_s", "call_ends_s", "call_tokens"),
        tools=_entries(row, "tool_names", "tool_starts_s", "tool_ends_s", "tool_errors"),
    )


def _entries(row: dict[str, Any], *names: str) -> list[Any]:
    return list(zip(*(row[name] for name in names), strict=True))


def show_samples(
    run_dir: str | Path,
    selection: SampleSelection,
    *,
    decode: Decode | None = None,
    as_json: bool = False,
    console: Console | None = None,
) -> None:
    """Print the selected rollouts; on a terminal, through its pager. Raises ConfigurationError when none matches."""
    kept = KeptSamples(run_dir, decode)
    chosen, steps = kept.select(selection)
    if as_json:
        for sample in kept.read(chosen):
            sys.stdout.write(msgspec.json.encode(sample).decode() + "\n")
        return
    if not chosen:
        held = f"it holds steps {steps[0]} to {steps[-1]}" if steps else "no step has been trained"
        raise ConfigurationError(f"no rollout matches; {held}")
    console = console or Console(highlight=False)
    with console.pager(styles=True) if console.is_terminal else nullcontext():
        for panel in _panels(kept.read(chosen), len(chosen)):
            console.print(panel)


def _panels(samples: Iterable[KeptSample], count: int) -> Iterator[Panel]:
    for position, sample in enumerate(samples, start=1):
        step = "no step" if sample.step is None else f"step {sample.step}"
        title = Text(f"{position}/{count} · {step} · group {sample.group}, member {sample.member}")
        yield Panel(_body(sample), title=title, title_align="left", border_style="green" if sample.solved else "red")


def _body(sample: KeptSample) -> Text:
    body = Text()
    advantage = "" if sample.advantage is None else f" · advantage {sample.advantage:+.3f}"
    body.append("solved" if sample.solved else "not solved", style="bold green" if sample.solved else "bold red")
    body.append(
        f" · reward {sample.reward:g}{advantage} · {sample.tokens} tokens · "
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


def _versions(sample: KeptSample) -> str:
    if not sample.versions:
        return "no version"
    spans = ", ".join(f"{version} (×{tokens})" for version, tokens in sample.versions)
    word = "version" if len(sample.versions) == 1 else "versions"
    return f"{word} {spans}" + ("" if sample.step is None else f", staleness {sample.step - sample.versions[0][0]}")


def _times(sample: KeptSample) -> str:
    """Its calls and tools in order, and how long each took."""
    did = [(start_s, end_s, f"call of {tokens} tokens", False) for start_s, _, end_s, tokens in sample.calls]
    did += [(start_s, end_s, visible(name) or "unknown tool", error) for name, start_s, end_s, error in sample.tools]
    parts = [f"{what} {duration(end_s - start_s)}" + " (error)" * error for start_s, end_s, what, error in sorted(did)]
    return " · ".join(parts)


def _pruned(pruned: Pruned) -> str:
    where = f"by {pruned.pruner} at {pruned.at_tokens} tokens: {pruned.why}"
    if not pruned.audited:
        return f"pruned {where}; about {pruned.saved_tokens:.0f} tokens saved"
    reward = "" if pruned.cut_reward is None else f"; pruning would have given {pruned.cut_reward:g}"
    return f"audited, else pruned {where}{reward}"


def visible(text: str) -> str:
    """``text`` with control characters escaped: a model's output must not be able to control the terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)
