"""A made-up run of any size for `watch.py`: what a long run leaves in its folder, its rollouts written by the writer of
a live one.

    python benchmarks/watch_run.py FOLDER [--rollouts 500000]

Words of a Zipf vocabulary and lines of code, in a byte-level BPE tokenizer; groups of 8, some of which fail, are
pruned, filtered or never finish; updates within rollouts; turns with tools; texts that attack a page; a million tokens
in one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.records.generation import VersionSpan
from headway.records.ledger import EventRecord
from headway.records.rollout import Failure, Pruned, Rollout
from headway.records.tokens import TokenIds, TokenLogprobs, TokenMask
from headway.records.trace import GroupTrace, Mark, RolloutTrace, Span
from headway.runtime.clock import VirtualClock
from headway.runtime.run_directory import RunDirectory
from headway.telemetry.rollouts.columns import (
    ENDED,
    FINISHED,
    TRAINED,
    ended_batch,
    finished_batch,
    list_array,
    trained_batch,
)
from headway.telemetry.rollouts.segments import SegmentWriter
from headway.telemetry.trace_file import TraceFile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support.synthetic_run import evaluation, step_record

GROUP, GROUPS_PER_STEP, GROUPS_PER_BATCH = 8, 32, 128
TASKS, WORDS, LINES = 4000, 20_000, 2000
RESPONSE_TOKENS = 270  # mean
LONG_TOKENS = 1_000_000
SECONDS_PER_STEP = 20.0
RARE = "quixarvundel"
ABSENT = "tormelisandry"
SEARCHES = {"common": "therefore", "rare": RARE, "absent": ABSENT, "code": "return sorted(total"}
HOSTILE = (
    "<script>window.__pwned=1</script>",
    "<img src=x onerror=\"window.__pwned='img'\">",
    '"><a href="javascript:window.__pwned=1">link</a>',
    "</textarea></pre><style>*{display:none}</style>",
    "\u202eecivda\u202c \u05e9\u05dc\u05d5\u05dd a\0b\x1b[31m\u2028\ufeff",
)
_DONE = "complete"


class Language:
    """Words and lines of code as token ids, and a tokenizer that has them."""

    def __init__(self, folder: Path) -> None:
        """``folder``: tokenizer.json and tokenizer_config.json are written there."""
        chance = np.random.default_rng(1)
        words = self._words(chance)
        lines = [self._line(chance, words) for _ in range(LINES)]
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=16_000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        backend.train_from_iterator([" ".join(words[:6000]), *lines[:500]], trainer)
        backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<|end|>", "<|user|>")])
        folder.mkdir(parents=True, exist_ok=True)
        backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
        self.backend = backend
        self.end = backend.token_to_id("<|end|>")
        encoded = [one.ids for one in backend.encode_batch([*(f" {word}" for word in words), *lines])]
        self.lengths = np.array([len(ids) for ids in encoded])
        self._starts = np.cumsum(self.lengths) - self.lengths
        self._ids = np.concatenate([np.array(ids, np.int32) for ids in encoded])
        self._shares = np.cumsum(1 / np.arange(1, WORDS + 1))

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.backend.encode(text).ids, np.int32)

    def draw(self, chance: np.random.Generator, count: int, code: np.ndarray) -> np.ndarray:
        """``count`` units: words by Zipf's law, lines where ``code``."""
        units = np.searchsorted(self._shares, chance.random(count) * self._shares[-1])
        return np.where(code, WORDS + chance.integers(0, LINES, count), units)

    def tokens(self, units: np.ndarray) -> np.ndarray:
        """The tokens of units, one after another."""
        lengths = self.lengths[units]
        ends = np.cumsum(lengths)
        return self._ids[np.repeat(self._starts[units] - ends + lengths, lengths) + np.arange(ends[-1])]

    @staticmethod
    def _words(chance: np.random.Generator) -> list[str]:
        onsets = ("", *"bcdfghlmnprstv", "th", "st", "tr", "pl")
        parts = [onset + rest for onset in onsets for rest in ("a", "e", "i", "o", "u", "en", "er", "al", "on")]
        found = dict.fromkeys(["the", "is", "so", "of", "and", "therefore", "we", "number", "résumé", "答案", "Ответ"])
        while len(found) < WORDS:
            found.setdefault("".join(chance.choice(parts, chance.integers(1, 5))))
        return list(found)

    @staticmethod
    def _line(chance: np.random.Generator, words: Sequence[str]) -> str:
        a, b = (words[at] for at in chance.integers(10, 400, 2))
        forms = [f"\ndef {a}({b}, n=0):", f"\n    for {a} in range(len({b})):", f"\n    {a} = {b}[n] + 1  # {a}",
                 f"\n    return sorted(total_{a}, key=len)", f"\n    if {a} is None and {b} >= 0:"]  # fmt: skip
        return forms[chance.integers(len(forms))]


def write_once(folder: Path, rollouts: int) -> Path:
    """The folder of a run with at least ``rollouts`` rollouts; made unless it is there whole."""
    if (folder / _DONE).is_file() and json.loads((folder / _DONE).read_text())["rollouts"] == rollouts:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    language = Language(folder / "best")
    (folder / "tasks.jsonl").write_text('{"prompt": "p", "answer": "a"}\n')
    RunDirectory(folder).store(_configuration(folder))
    steps = RecordWriter(folder, language, rollouts).write()
    _write_ledger(folder, steps)
    _write_trace(folder, steps)
    (folder / _DONE).write_text(json.dumps({"rollouts": rollouts, "steps": steps}))
    return folder


class RecordWriter:
    """Writes the record of a run, batch for batch, each stream by the writer that live runs have."""

    def __init__(self, folder: Path, language: Language, rollouts: int) -> None:
        self._language, self._groups = language, -(-rollouts // GROUP)
        self._chance = np.random.default_rng(2)
        record = folder / "rollouts"
        metadata = {"share": 1.0, "books": 0, "rows": 0}
        self._finished = SegmentWriter(record / "finished", FINISHED, metadata=metadata)
        self._ended, self._trained = SegmentWriter(record / "ended", ENDED), SegmentWriter(record / "trained", TRAINED)
        self._prompts = [language.encode(f"<|user|>Task {n}: {self._phrase()}?") for n in range(TASKS)]
        self._waiting: list[Rollout] = []  # whole groups that a step will train
        self._step = self._rows = 0

    def write(self) -> int:
        """Write it all; the number of steps."""
        special = {int(at): RARE for at in np.linspace(0.01, 0.99, 3) * self._groups * GROUP}
        special |= {100 + 1000 * n: text for n, text in enumerate(HOSTILE * 4) if 100 + 1000 * n < self._groups * GROUP}
        for first in range(0, self._groups, GROUPS_PER_BATCH):
            groups = np.arange(first, min(first + GROUPS_PER_BATCH, self._groups))
            rollouts, reached = self._batch(groups, special)
            self._finished.append(
                finished_batch(rollouts, [self._task(r.group) for r in rollouts], reached), self._rows
            )
            self._rows += len(rollouts)
            self._end(groups, rollouts, reached)
        for writer in (self._finished, self._ended, self._trained):
            writer.close()
        return self._step

    def _phrase(self) -> str:
        count = int(self._chance.integers(8, 24))
        units = self._language.draw(self._chance, count, np.zeros(count, bool))
        return self._language.backend.decode(self._language.tokens(units).tolist()).strip()

    def _task(self, group: int) -> str:
        return f"synthetic/{group * 7919 % TASKS:05d}"

    def _batch(self, groups: np.ndarray, special: dict[int, str]) -> tuple[list[Rollout], dict[int, int]]:
        chance, language = self._chance, self._language
        count = len(groups) * GROUP
        words = np.clip(chance.lognormal(np.log(RESPONSE_TOKENS / 2.6), 0.7, count), 4, 3000).astype(int)
        owners = np.repeat(np.arange(count), words)
        units = language.draw(chance, len(owners), (chance.random(count) < 0.1)[owners])
        ids = language.tokens(units)
        lengths = np.bincount(owners, language.lengths[units]).astype(int)
        logprobs = -chance.exponential(0.6, len(ids)).astype(np.float32)
        solved, cuts, kinds = chance.random(count), chance.random(count), chance.random(count)
        ends = np.cumsum(lengths).tolist()
        rollouts, reached = [], dict[int, int]()
        for at in range(count):
            start, end, group = ends[at] - int(lengths[at]), ends[at], int(groups[at // GROUP])
            own, probability = ids[start:end], logprobs[start:end]
            text = special.get(self._rows + at)
            if text is not None:
                own = np.concatenate([own[:20], language.encode(f" {text} "), own[20:]])
            if group == self._groups // 2 and at % GROUP == 3:
                own = np.resize(ids, LONG_TOKENS)
            if len(own) != len(probability):
                probability = np.resize(probability, len(own))
            if kinds[at] < 0.002:
                reached[at] = len(own)
                rollouts.append(Rollout(group=group, member=at % GROUP, prompt_ids=(), finish_reason="abort"))
            else:
                numbers = float(solved[at]), float(cuts[at]), float(kinds[at])
                rollouts.append(self._rollout(group, at % GROUP, own, probability, numbers))
        return rollouts, reached

    def _rollout(
        self, group: int, member: int, ids: np.ndarray, logprobs: np.ndarray, numbers: tuple[float, float, float]
    ) -> Rollout:
        luck, cut, kind = numbers
        version = max(0, group // GROUPS_PER_STEP - 1)
        first = int(len(ids) * cut)
        crosses = first > 0 and kind < 0.5
        spans = ((version, first), (version + 1, len(ids) - first)) if crosses else ((version, len(ids)),)
        began_s = group / GROUPS_PER_STEP * SECONDS_PER_STEP
        tools = 0.9 < kind < 0.95 and len(ids) > 40
        mask = np.ones(len(ids), bool)
        if tools:
            mask[20:30] = False
        failed = kind > 0.99
        solved = not failed and luck < 0.3 + 0.5 * group / self._groups
        pruned = Pruned(pruner="loops", reason="it repeats itself", at_tokens=len(ids)) if 0.98 < kind < 0.985 else None
        return Rollout(
            group=group,
            member=member,
            prompt_ids=TokenIds.view(self._prompts[group * 7919 % TASKS]),
            response_ids=TokenIds.view(ids),
            response_logprobs=TokenLogprobs.view(logprobs),
            response_mask=TokenMask.view(mask),
            versions=tuple(VersionSpan(version=v, tokens=n) for v, n in spans),
            finish_reason="length" if len(ids) > 2000 else "stop",
            reward=0.0 if failed else round(float(solved) - 0.1 * cut, 3),
            solved=solved,
            verdict={"ended": "answered", "score": round(luck, 2)} if tools else {},
            failure=Failure(boundary=("environment", "sandbox", "reward")[group % 3], cause="the tool has timed out",
                            infrastructure=True) if failed else None,
            removal="pruned" if pruned else None,
            removal_reason="loops" if pruned else "",
            pruned=pruned,
            turns=2 if tools else 1,
            turn_ends=(20, len(ids)) if tools else (),
            opened_s=began_s,
            first_token_s=began_s + 0.2,
            generated_s=began_s + 0.2 + min(30.0, len(ids) * 0.02),
            finished_s=began_s + 0.4 + min(30.0, len(ids) * 0.02),
            verify_s=0.1,
        )  # fmt: skip

    def _end(self, groups: np.ndarray, rollouts: list[Rollout], reached: dict[int, int]) -> None:
        """End the groups: some filtered, those with unfinished rollouts discarded, the others trained."""
        rows: list[tuple[int, str, str, int | None, float]] = []
        cut_off = {rollouts[at].group for at in reached}
        for place, group in enumerate(groups.tolist()):
            now_s = group / GROUPS_PER_STEP * SECONDS_PER_STEP + 60.0
            if group in cut_off:
                rows.append((group, "discarded", "surplus", None, now_s))
            elif group % 7 == 3:
                rows.append((group, "filtered", "zero_variance", None, now_s))
            else:
                self._waiting += rollouts[place * GROUP : (place + 1) * GROUP]
                if len(self._waiting) == GROUPS_PER_STEP * GROUP:
                    rows += self._train(now_s)
        if rows:
            self._ended.append(ended_batch(rows), 0)

    def _train(self, now_s: float) -> list[tuple[int, str, str, int | None, float]]:
        batch, self._waiting = self._waiting, []
        valid = [rollout for rollout in batch if rollout.valid]
        lengths = [len(rollout.response_ids) for rollout in valid]
        logprobs = TokenLogprobs.concatenated([rollout.response_logprobs for rollout in valid])
        away = self._chance.normal(0, 0.05, len(logprobs)).astype(np.float32)
        clipped = np.abs(away) > 0.15
        advantages = np.repeat(np.array([r.reward for r in valid], np.float32) - np.float32(0.5), lengths)
        self._trained.append(
            trained_batch(
                step=np.full(len(valid), self._step),
                group=[rollout.group for rollout in valid],
                member=[rollout.member for rollout in valid],
                sequence=np.zeros(len(valid), int),
                weight=np.ones(len(valid)),
                logprobs=list_array(logprobs + away, lengths),
                clipped=list_array(clipped, lengths),
                trained=list_array(~clipped, lengths),
                advantages=list_array(advantages, lengths),
            ),
            self._step,
        )
        step, self._step = self._step, self._step + 1
        return [(group, "trained", "", step, now_s) for group in sorted({rollout.group for rollout in batch})]


def _configuration(folder: Path) -> Experiment:
    return validate_experiment(
        {
            "run": {"directory": str(folder), "steps": 1_000_000},
            "model": {"path": str(folder / "best")},
            "tasks": {"train": {"path": str(folder / "tasks.jsonl")}},
            "verifier": {"name": "regex", "parameters": {"pattern": "^"}},
            "rollout": {"group_size": GROUP, "max_prompt_tokens": 64, "max_response_tokens": 4000},
            "queue": {"groups_per_step": GROUPS_PER_STEP, "budget": 4},
            "ledger": {"trackers": ()},
        },
        "benchmark",
    )


def _write_ledger(folder: Path, steps: int) -> None:
    encoder = msgspec.json.Encoder()
    with open(folder / "ledger.jsonl", "wb") as file:
        lines: list[Any] = [EventRecord(event="start", detail="made up"), evaluation("before", 0, 0.3)]
        for step in range(steps):
            lines.append(step_record(step, time_s=(step + 1) * SECONDS_PER_STEP, step_s=SECONDS_PER_STEP))
            if step % 200 == 199:
                lines.append(evaluation("during", step + 1, 0.3 + 0.5 * step / steps, split="validation"))
                lines.append(EventRecord(event="restart", detail="a worker", step=step, worker="generator-0"))
        file.writelines(encoder.encode(line) + b"\n" for line in lines)


def _write_trace(folder: Path, steps: int) -> None:
    """The newest steps, as their trace would be left."""
    clock = VirtualClock()
    with TraceFile(folder, clock, 1.7e9) as trace:
        for step in range(max(0, steps - 30), steps):
            at_s = (step - max(0, steps - 30)) * SECONDS_PER_STEP
            trace.write(Span(track="trainer", name="compute", start_s=at_s + 4, end_s=at_s + 18, step=step))
            trace.write(Mark(event="update", detail=f"version {step + 1}", time_s=at_s + 18))
            for group in range(GROUPS_PER_STEP):
                members = tuple(
                    RolloutTrace(member=member, first_token_s=at_s + 0.2, generated_s=at_s + 4 + member,
                                 finished_s=at_s + 5 + member, verify_s=0.1, tokens=200, first_version=step,
                                 last_version=step, reward=1.0, resumes=0, reprefills=0, failure="")
                    for member in range(GROUP)
                )  # fmt: skip
                trace.write(GroupTrace(index=step * GROUPS_PER_STEP + group, task=f"synthetic/{group:05d}",
                                       admitted_s=at_s, admitted_version=step, finished_s=at_s + 13,
                                       rollouts=members))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rollouts", type=int, default=500_000)
    arguments = parser.parse_args()
    started_s = time.perf_counter()
    folder = write_once(arguments.folder, arguments.rollouts)
    size = sum(path.stat().st_size for path in (folder / "rollouts").rglob("*.arrow"))
    print(f"{folder}: {size / 1e9:.2f} GB of rollouts, in {time.perf_counter() - started_s:.0f} s")


if __name__ == "__main__":
    main()
