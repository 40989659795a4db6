"""`headway show`: the rollouts that a run kept as samples, one by one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import msgspec
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from headway.records.errors import ConfigurationError
from headway.records.rollout import Pruned
from headway.runtime.run_directory import RunDirectory
from headway.telemetry.trace_file import decoded_lines


class KeptSample(msgspec.Struct, frozen=True, kw_only=True):
    """A kept rollout: a line of ``RUN/samples.jsonl``."""

    step: int  # trainer version before the step that trained it
    group: int
    member: int
    prompt: str
    response: str
    reward: float
    solved: bool
    advantage: float
    versions: list[tuple[int, int]]  # (version, tokens) spans of the response
    finish_reason: str
    ending: str
    pruned: Pruned | None = None  # ended early, or audited

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.versions)


class SampleSelection(msgspec.Struct, frozen=True, kw_only=True):
    """Which samples to show; None doesn't filter."""

    step: int | None = None
    group: int | None = None
    solved: bool | None = None
    limit: int | None = None  # at most this many, the newest

    def takes(self, sample: KeptSample) -> bool:
        return (
            self.step in (None, sample.step)
            and self.group in (None, sample.group)
            and self.solved in (None, sample.solved)
        )


def read_samples(run_dir: str | Path) -> list[KeptSample]:
    """Read every kept sample, oldest first; of one recorded again after a resume only the last. Skips a torn last line.

    Raises ConfigurationError when the run kept none or a line is damaged.
    """
    path = RunDirectory(run_dir).samples
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        hint = "ledger.samples_per_step may be 0, or nothing was trained yet"
        raise ConfigurationError(f"{run_dir} holds no samples: there is no {path} ({hint})") from None
    samples: dict[tuple[int, int, int], KeptSample] = {}
    for sample in decoded_lines(path, data, msgspec.json.Decoder(KeptSample).decode):
        samples.pop((sample.step, sample.group, sample.member), None)
        samples[(sample.step, sample.group, sample.member)] = sample
    return list(samples.values())


def select(samples: Sequence[KeptSample], selection: SampleSelection) -> list[KeptSample]:
    chosen = [sample for sample in samples if selection.takes(sample)]
    return chosen if selection.limit is None else chosen[-selection.limit :]


def show_samples(
    run_dir: str | Path, selection: SampleSelection, *, as_json: bool = False, console: Console | None = None
) -> None:
    """Print the selected samples; on a terminal, through its pager. Raises ConfigurationError when none matches."""
    samples = read_samples(run_dir)
    chosen = select(samples, selection)
    if as_json:
        for sample in chosen:
            sys.stdout.write(msgspec.json.encode(sample).decode() + "\n")
        return
    if not chosen:
        steps = sorted({sample.step for sample in samples})
        held = f"it holds steps {steps[0]} to {steps[-1]}" if steps else "it holds none"
        raise ConfigurationError(f"no kept sample matches; {held} ({len(samples)} samples)")
    console = console or Console(highlight=False)
    with console.pager(styles=True) if console.is_terminal else nullcontext():
        for panel in _panels(chosen):
            console.print(panel)


def _panels(samples: Sequence[KeptSample]) -> Iterator[Panel]:
    for position, sample in enumerate(samples, start=1):
        title = Text(f"{position}/{len(samples)} · step {sample.step} · group {sample.group}, member {sample.member}")
        yield Panel(_body(sample), title=title, title_align="left", border_style="green" if sample.solved else "red")


def _body(sample: KeptSample) -> Text:
    body = Text()
    body.append("solved" if sample.solved else "not solved", style="bold green" if sample.solved else "bold red")
    body.append(
        f" · reward {sample.reward:g} · advantage {sample.advantage:+.3f} · {sample.tokens} tokens · "
        f"{_versions(sample)} · finish {sample.finish_reason} · {sample.ending}\n\n",
        style="dim",
    )
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
    return f"{word} {spans}, staleness {sample.step - sample.versions[0][0]}"


def _pruned(pruned: Pruned) -> str:
    where = f"by {pruned.pruner} at {pruned.at_tokens} tokens: {pruned.why}"
    if not pruned.audited:
        return f"pruned {where}; about {pruned.saved_tokens:.0f} tokens saved"
    reward = "" if pruned.cut_reward is None else f"; pruning would have given {pruned.cut_reward:g}"
    return f"audited, else pruned {where}{reward}"


def visible(text: str) -> str:
    """``text`` with control characters escaped: a model's output must not be able to control the terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)
