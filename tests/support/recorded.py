"""Rollouts out of a record, and random ones to put into it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headway.config.schema import LedgerConfig
from headway.records.generation import VersionSpan
from headway.records.rollout import Branch, CallTimes, Failure, FinishedGroup, Group, Pruned, Rollout, ToolTimes
from headway.records.task import Task
from headway.records.tokens import TokenIds, TokenLogprobs, TokenMask
from headway.runtime.clock import VirtualClock
from headway.telemetry.rollouts.columns import TRAINED, list_array, trained_batch
from headway.telemetry.rollouts.reader import RolloutRecord
from headway.telemetry.rollouts.recorder import RolloutRecorder
from headway.telemetry.rollouts.segments import SegmentWriter


def rollouts_in(run: Path, start: int = 0) -> list[Rollout]:
    """Every recorded rollout that has finished, from number ``start`` on, in the order of arrival, as the record that
    was committed."""
    return [rollout_from(row) for row in rows_in(run, start) if row["verified"]]


def rows_in(run: Path, start: int = 0) -> Iterator[dict[str, Any]]:
    for _, batch in RolloutRecord(run).batches(start=start):
        yield from batch.to_pylist()


def rollout_from(row: dict[str, Any]) -> Rollout:
    """The rollout of a row."""
    known = {name: row[name] for name in Rollout.__struct_fields__ if name in row} | _sequence(row)
    known["turn_rewards"] = tuple(row["turn_rewards"])
    known["branches"] = tuple(Branch(**_sequence(branch)) for branch in row["branches"] or ())
    known["verdict"] = json.loads(row["verdict"] or "{}")
    for name, kind in (("failure", Failure), ("pruned", Pruned)):
        known[name] = None if row[name] is None else msgspec.json.decode(row[name], type=kind)
    calls = [row[name] for name in ("call_starts_s", "call_first_tokens_s", "call_ends_s", "call_tokens")]
    tools = [row[name] for name in ("tool_names", "tool_starts_s", "tool_ends_s", "tool_errors")]
    known["call_times"] = msgspec.convert(tuple(zip(*calls, strict=True)), tuple[CallTimes, ...])
    known["tool_times"] = msgspec.convert(tuple(zip(*tools, strict=True)), tuple[ToolTimes, ...])
    return Rollout(**known)


def _sequence(row: dict[str, Any]) -> dict[str, Any]:
    spans = zip(row["span_versions"], row["span_tokens"], strict=True)
    return {
        "prompt_ids": TokenIds(row["prompt_ids"]),
        "response_ids": TokenIds(row["response_ids"]),
        "response_logprobs": TokenLogprobs(row["response_logprobs"]),
        "response_mask": TokenMask(row["response_mask"]),
        "versions": tuple(VersionSpan(version=version, tokens=tokens) for version, tokens in spans),
        "turn_ends": tuple(row["turn_ends"]),
        "finish_reason": row["finish_reason"],
    }


def random_group(index: int, size: int, seed: int = 0) -> FinishedGroup:
    """A finished group with everything that a rollout may have, now and then."""
    chance = random.Random(f"{seed}-{index}")
    prompt = TokenIds([chance.randrange(1000) for _ in range(chance.randrange(1, 9))])
    group = Group(index=index, task=Task(task_id=f"task-{index % 7}", prompt="p"), prompt_ids=prompt, size=size,
                  admitted_version=0, admitted_s=chance.random())  # fmt: skip
    return FinishedGroup(group=group, rollouts=tuple(random_rollout(chance, group, m) for m in range(size)))


def random_rollout(chance: random.Random, group: Group, member: int) -> Rollout:
    first = _random_sequence(chance)
    many = chance.random() < 0.2
    failed = chance.random() < 0.1
    return Rollout(
        group=group.index,
        member=member,
        prompt_ids=group.prompt_ids,
        **first,
        reward=chance.random(),
        trained_reward=chance.choice([None, 0.25]),
        turn_rewards=tuple(chance.random() for _ in first["turn_ends"]),
        solved=chance.random() < 0.5,
        verdict=chance.choice([{}, {"ended": "é\x00\n", "n": [1, None]}]),
        failure=Failure(boundary="engine", cause="dead", infrastructure=True) if failed else None,
        removal=None if failed else chance.choice([None, "pruned"]),
        removal_reason=chance.choice(["", "loop"]),
        pruned=chance.choice([None, Pruned(pruner="loop", reason="x", at_tokens=3)]),
        opened_s=chance.random(),
        finished_s=chance.random(),
        judge_tokens=1 << 40,
        judge_cost=0.1,
        turns=chance.randrange(4),
        environment_version=chance.randrange(-1, 3),
        branches=tuple(Branch(prompt_ids=TokenIds([1, 2]), **_random_sequence(chance)) for _ in range(2 * many)),
        call_times=tuple(_random_call(chance) for _ in range(chance.randrange(3))),
        tool_times=tuple(_random_tool(chance) for _ in range(chance.randrange(3) * chance.randrange(2))),
    )


def _random_call(chance: random.Random) -> CallTimes:
    start_s, first_token_s, end_s = sorted(1e5 * chance.random() for _ in range(3))
    return CallTimes(start_s=start_s, first_token_s=first_token_s, end_s=end_s, tokens=chance.randrange(99))


def _random_tool(chance: random.Random) -> ToolTimes:
    start_s, end_s = sorted(1e5 * chance.random() for _ in range(2))
    return ToolTimes(name=chance.choice(["", "search", "é"]), start_s=start_s, end_s=end_s, error=chance.random() < 0.5)


def _random_sequence(chance: random.Random) -> dict[str, Any]:
    tokens = chance.choice([0, 1, chance.randrange(200)])
    cut = chance.randrange(tokens + 1)
    spans = [VersionSpan(version=v, tokens=n) for v, n in ((3, cut), (4, tokens - cut)) if n]
    return {
        "response_ids": TokenIds([chance.randrange(150_000) for _ in range(tokens)]),
        "response_logprobs": TokenLogprobs([-chance.random() for _ in range(tokens)]),
        "response_mask": TokenMask([chance.random() < 0.8 for _ in range(tokens)]),
        "versions": tuple(spans),
        "turn_ends": chance.choice([(), (tokens,)]),
        "finish_reason": chance.choice(["stop", "length"]),
    }


def letters(text: str) -> list[int]:
    """A text's ids where each character is a token."""
    return list(map(ord, text))


def spelt(ids: Iterable[int]) -> str:
    """The text of `letters`."""
    return "".join(map(chr, ids))


def record_texts(run: Path, rows: Iterable[dict[str, Any]], encode: Callable[[str], Sequence[int]] = letters) -> None:
    """Record groups of one rollout each, with the fields that `headway show --json` prints."""
    recorder = RolloutRecorder(run, LedgerConfig(), VirtualClock(), lambda *a, **k: None)
    recorder.begin(lambda share: 0)
    trained = SegmentWriter(run / "rollouts" / "trained", TRAINED)
    for row in rows:
        recorder.finished(_written(row, encode))
        recorder.ended([row["group"]], row["ending"], "", row["step"])
        if row["step"] is not None and row["advantage"] is not None:
            tokens = len(encode(row["response"]))
            alike = np.ones(tokens, np.bool_)
            lists = {"clipped": ~alike, "trained": alike, "logprobs": np.zeros(tokens, np.float32)}
            lists["advantages"] = np.full(tokens, row["advantage"], np.float32)
            columns = {name: list_array(values, [tokens]) for name, values in lists.items()}
            of = {"step": [row["step"]], "group": [row["group"]], "member": [row["member"]], "sequence": [0]}
            trained.append(trained_batch(**columns, **of, weight=[1.0]), row["step"])
    recorder.close()
    trained.close()


def _written(row: dict[str, Any], encode: Callable[[str], Sequence[int]]) -> FinishedGroup:
    prompt, response = TokenIds(encode(row["prompt"])), TokenIds(encode(row["response"]))
    task = Task(task_id=row["prompt"], prompt=row["prompt"])
    group = Group(index=row["group"], task=task, prompt_ids=prompt, size=1, admitted_version=0, admitted_s=0.0)
    known = {name: row[name] for name in ("group", "member", "reward", "solved", "finish_reason")}
    return FinishedGroup(group=group, rollouts=(Rollout(
        **known, prompt_ids=prompt, response_ids=response,
        response_logprobs=TokenLogprobs([0.0] * len(response)), response_mask=TokenMask([True] * len(response)),
        versions=tuple(VersionSpan(version=version, tokens=tokens) for version, tokens in row["versions"]),
        failure=msgspec.convert(row.get("failure"), Failure | None),
        pruned=msgspec.convert(row.get("pruned"), Pruned | None),
        call_times=msgspec.convert(row.get("calls", ()), tuple[CallTimes, ...]),
        tool_times=msgspec.convert(row.get("tools", ()), tuple[ToolTimes, ...]),
    ),))  # fmt: skip
