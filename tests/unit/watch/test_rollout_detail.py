"""One rollout with what engine and trainer say of its tokens, and tasks over time."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.config.schema import LedgerConfig
from headway.records.generation import VersionSpan
from headway.records.rollout import CallTimes, FinishedGroup, Group, Rollout
from headway.records.task import Task
from headway.records.tokens import TokenIds, TokenLogprobs, TokenMask
from headway.report.watch.rollouts import rollout_detail
from headway.report.watch.rollouts.text_index import TokenTable
from headway.report.watch.rollouts.watched_rollouts import WatchedRollouts
from headway.runtime.clock import VirtualClock
from headway.telemetry.rollouts.columns import TRAINED, finished_batch, list_array, trained_batch
from headway.telemetry.rollouts.joined import JoinedRollouts
from headway.telemetry.rollouts.recorder import RolloutRecorder
from headway.telemetry.rollouts.segments import SegmentWriter
from tests.support.recorded import random_group

GROUPS = [random_group(index, 4) for index in range(24)]
TOKENS = TokenTable([f" {number}".encode() for number in range(150_000)])


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Groups of which every third is trained, one a step, with the trainer's log-probabilities 0.5 below the engine's,
    and of the second trained token none."""
    recorder = RolloutRecorder(tmp_path, LedgerConfig(), VirtualClock(), lambda *a, **k: None)
    recorder.begin(lambda share: 0)
    writer = SegmentWriter(tmp_path / "rollouts" / "trained", TRAINED)
    for index, group in enumerate(GROUPS):
        recorder.finished(group)
        if index % 3 or not group.valid:
            continue
        step = index // 3
        recorder.ended([index], "trained", f"step {step}", step)
        sequences = [(r, n, s) for r in group.rollouts if r.valid for n, s in enumerate(r.sequences)]
        lengths = [len(s.response_ids) for _, _, s in sequences]
        logprobs = np.concatenate([np.array(s.response_logprobs, np.float32) - 0.5 for _, _, s in sequences])
        logprobs[1:2] = math.nan
        flags = np.arange(len(logprobs)) % 2 == 0
        writer.append(
            trained_batch(
                step=[step] * len(sequences), group=[index] * len(sequences),
                member=[r.member for r, _, _ in sequences], sequence=[n for _, n, _ in sequences],
                weight=[1.0] * len(sequences), logprobs=list_array(logprobs, lengths),
                clipped=list_array(flags, lengths), trained=list_array(~flags, lengths),
                advantages=list_array(np.full(len(logprobs), 0.25, np.float32), lengths),
            ),
            step,
        )  # fmt: skip
    recorder.close()
    writer.close()
    return tmp_path


def near(found: list[float | None], expected: Any) -> bool:
    """Whether values are equal to five digits; None stands for NaN."""
    return len(found) == len(expected) and np.allclose(
        [math.nan if v is None else v for v in found],
        [math.nan if v is None else v for v in expected],
        1e-4,
        equal_nan=True,
    )


def require_equal(found: dict[str, Any], row: dict[str, Any], trained: dict[str, Any] | None) -> None:
    """``found`` is the whole of a recorded sequence with the trainer's values."""
    before = [None] * len(row["prompt_ids"])
    ids = row["prompt_ids"] + row["response_ids"]
    assert (found["ids"], found["offset"], found["total_tokens"]) == (ids, 0, len(ids))
    assert found["tokens"] == [f" {i}" for i in ids]
    assert found["mask"] == [False] * len(before) + row["response_mask"]
    versions = [v for v, n in zip(row["span_versions"], row["span_tokens"], strict=True) for _ in range(n)]
    mask = row["response_mask"]
    assert found["versions"] == before + [v if m else None for v, m in zip(versions, mask, strict=True)]
    assert near(
        found["logprobs"], before + [p if m else None for p, m in zip(row["response_logprobs"], mask, strict=True)]
    )
    if trained is None:
        assert found["ratios"] is found["trainer_logprobs"] is None
        return
    assert near(found["trainer_logprobs"], [*before, *trained["logprobs"]])
    assert near(found["ratios"], before + [r if m else None for r, m in zip(trained["ratios"], mask, strict=True)])
    for name in ("clipped", "trained"):
        assert found[name] == before + trained[name]
    assert near(found["advantages"], [*before, *trained["advantages"]])


def test_every_sequence_is_what_was_recorded(run: Path) -> None:
    watched, number, joins = WatchedRollouts(run, TOKENS), 0, 0
    for batch in JoinedRollouts(run).batches():
        for row in batch.to_pylist():
            found = watched.rollout(number)
            trunk, *branches = found["sequences"]
            known = {n: row[f"trainer_{n}"] for n in ("logprobs", "ratios", "clipped", "trained", "advantages")}
            require_equal(trunk, row, None if row["trainer_logprobs"] is None else known)
            assert len(branches) == len(row["branches"] or ())
            for at, (branch, own) in enumerate(zip(branches, row["branches"] or (), strict=True)):
                require_equal(branch, own, (row["trainer_branches"] or [None] * 9)[at])
            joins += row["trainer_logprobs"] is not None
            names = ("group", "member", "task_id", "reward", "trained_reward", "solved", "tokens", "step", "ending")
            assert {name: found[name] for name in names} == {name: row[name] for name in names}
            for name in ("verdict", "failure", "pruned"):
                assert found[name] == (None if row[name] is None else json.loads(row[name]))
            assert [s["member"] for s in found["siblings"]] == [m for m in range(4) if m != row["member"]]
            number += 1
    assert joins > 10
    watched.close()


def test_parts_are_whole_and_each_sampled_one_of_the_trunk_is_a_turn(run: Path) -> None:
    watched = WatchedRollouts(run, TOKENS)
    for number in range(96):
        found = watched.rollout(number, sequence=0, offset=2, limit=3)
        for sequence in found["sequences"]:
            parts = sequence["parts"]
            assert [part["from"] for part in parts] == [0, *(part["to"] for part in parts[:-1])]
            assert parts[-1]["to"] == sequence["total_tokens"]
        sampled = [part for part in found["sequences"][0]["parts"] if part["kind"] == "sampled"]
        assert [turn["tokens"] for turn in found["turns"]] == [part["to"] - part["from"] for part in sampled]
    watched.close()


def test_turns_have_the_times_of_their_calls() -> None:
    calls = tuple(CallTimes(start_s=at, first_token_s=at, end_s=at + 1, tokens=1) for at in (1.0, 4.0))
    parts = [{"kind": kind, "from": at, "to": at + 1} for at, kind in enumerate(("sampled", "observation", "sampled"))]
    rollout = Rollout(group=0, member=0, prompt_ids=(1,), finish_reason="stop", call_times=calls)
    found = rollout_detail.turns(parts, finished_batch([rollout], ["t"]))
    assert [(turn["start_s"], turn["end_s"], turn["reward"]) for turn in found] == [(1.0, 2.0, None), (4.0, 5.0, None)]
    assert (
        rollout_detail.turns(parts[:1], finished_batch([rollout], ["t"]))[0]["start_s"] is None
    )  # a call had no answer


def test_windows_are_parts_of_the_whole(run: Path) -> None:
    watched = WatchedRollouts(run, TOKENS)
    lists = ("ids", "tokens", "logprobs", "versions", "mask", "trainer_logprobs", "ratios", "clipped", "advantages")
    row = next(n for n in range(96) if len(watched.rollout(n)["sequences"]) > 1)
    for number in (0, 1, 2, row):
        whole = watched.rollout(number)["sequences"]
        for offset, limit in ((0, 5), (3, 40), (20, 7), (10_000, 5), (0, 0)):
            found = watched.rollout(number, sequence=0, offset=offset, limit=limit)["sequences"]
            assert all(other["ids"] == [] and other["total_tokens"] for other in found[1:])
            for name in lists:
                expected = whole[0][name]
                assert found[0][name] == (None if expected is None else expected[offset : offset + limit]), name
    watched.close()


def write_one(run: Path, **fields: Any) -> None:
    group = Group(index=0, task=Task(task_id="t", prompt="p"), prompt_ids=TokenIds([1]), size=1, admitted_version=0,
                  admitted_s=0.0)  # fmt: skip
    recorder = RolloutRecorder(run, LedgerConfig(), VirtualClock(), lambda *a, **k: None)
    recorder.begin(lambda share: 0)
    length = len(fields["response_ids"])
    rollout = Rollout(
        group=0, member=0, prompt_ids=TokenIds([1]), response_logprobs=TokenLogprobs.filled(-0.5, length),
        versions=(VersionSpan(version=0, tokens=length),), **fields,
    )  # fmt: skip
    recorder.finished(FinishedGroup(group=group, rollouts=(rollout,)))
    recorder.close()


def test_characters_of_several_tokens_and_bytes_that_are_none(tmp_path: Path) -> None:
    table = TokenTable([b"\xe4\xbd", b"\xa0", b"ok", b"\xff", "🙂".encode()[:2], "🙂".encode()[2:], b"<script>"])
    ids = [0, 1, 2, 3, 1, 4, 5, 0, 2, 6, 4]
    write_one(tmp_path, response_ids=TokenIds(ids), response_mask=TokenMask.filled(True, len(ids)))
    watched = WatchedRollouts(tmp_path, table)
    tokens = watched.rollout(0)["sequences"][0]["tokens"]
    assert tokens == ["\\xa0", "", "你", "ok", "\\xff", "\\xa0", "", "🙂", "", "\\xe4\\xbdok", "<script>", "\\xf0\\x9f"]
    for offset in range(2, len(tokens)):
        window = watched.rollout(0, sequence=0, offset=offset, limit=3)["sequences"][0]["tokens"]
        assert window[:2] == tokens[offset : offset + 2], "a window doesn't cut characters at its beginning"
    watched.close()
    untold = WatchedRollouts(tmp_path, None).rollout(0)["sequences"][0]
    assert (untold["tokens"], untold["ids"]) == ([None] * 12, [1, *ids])
    smaller = WatchedRollouts(tmp_path, TokenTable([b"a"])).rollout(0)["sequences"][0]
    assert smaller["tokens"][1] == "a", "ids that a tokenizer lacks are empty"


def test_rollout_of_a_million_tokens_comes_in_windows(tmp_path: Path) -> None:
    ids = np.arange(1_000_000, dtype=np.int32) % 150_000
    mask = np.arange(len(ids)) % 2 == 0  # as many parts as there can be
    write_one(tmp_path, response_ids=TokenIds(ids), response_mask=TokenMask(mask))
    watched = WatchedRollouts(tmp_path, TOKENS)
    (found,) = watched.rollout(0, sequence=0, offset=999_999, limit=50)["sequences"]
    assert (found["ids"], found["total_tokens"], found["prompt_tokens"]) == (ids[-2:].tolist(), 1_000_001, 1)
    assert len(found["parts"]) < 6000
    assert found["parts"][-1]["to"] == 1_000_001
    assert len(watched.rollout(0, limit=10**9)["sequences"][0]["ids"]) == 20_000
    assert len(json.dumps(watched.rollout(0))) < 2_000_000
    watched.close()


def test_life_goes_from_admission_to_the_gradient(tmp_path: Path) -> None:
    clock = VirtualClock()
    now = [0.0]
    clock.now = lambda: now[0]
    recorder = RolloutRecorder(tmp_path, LedgerConfig(), clock, lambda *a, **k: None)
    recorder.begin(lambda share: 0)
    for index in range(4):
        group = Group(index=index, task=Task(task_id="t", prompt="p"), prompt_ids=TokenIds([1]), size=1,
                      admitted_version=0, admitted_s=0.0)  # fmt: skip
        one = Rollout(group=index, member=0, prompt_ids=TokenIds([1]), opened_s=1.0, first_token_s=2.0,
                      generated_s=5.0, finished_s=6.0 + index)  # fmt: skip
        recorder.finished(FinishedGroup(group=group, rollouts=(one,)))
    for step, now_s in ((0, 9.0), (1, 12.5)):
        now[0] = now_s
        recorder.ended([step], "trained", "", step)
    now[0] = 20.0
    recorder.ended([3], "filtered", "", None)
    recorder.close()
    watched = WatchedRollouts(tmp_path, TOKENS)

    def periods(row: int) -> dict[str, tuple[float, float]]:
        return {one["name"]: (one["start_s"], one["end_s"]) for one in watched.rollout(row)["life"]}

    common = {"waiting": (1.0, 2.0), "generating": (2.0, 5.0)}
    assert periods(0) == {**common, "verifying": (5.0, 6.0), "buffered": (6.0, 6.0), "training": (6.0, 9.0)}
    assert periods(1) == {**common, "verifying": (5.0, 7.0), "buffered": (7.0, 9.0), "training": (9.0, 12.5)}
    assert periods(2) == {**common, "verifying": (5.0, 8.0)}
    assert periods(3) == {**common, "verifying": (5.0, 9.0), "buffered": (9.0, 20.0)}
    watched.close()


def test_tasks_are_counted_over_time(run: Path) -> None:
    watched = WatchedRollouts(run, TOKENS)
    rollouts = [r for group in GROUPS for r in group.rollouts]
    names = [f"task-{r.group % 7}" for r in rollouts]
    found = watched.tasks(4)
    assert (len(found["tasks"]), found["tasks_total"], found["problems"]) == (7, 7, [])
    for task in found["tasks"]:
        own = [(at, r) for at, (r, name) in enumerate(zip(rollouts, names, strict=True)) if name == task["task_id"]]
        judged = [(at, r) for at, r in own if r.failure is None]
        assert task["rollouts"] == len(own)
        assert task["failures"] == len(own) - len(judged)
        assert task["solved_rate"] == round(sum(r.solved for _, r in judged) / len(judged), 4)
        assert task["tokens_mean"] == pytest.approx(sum(r.response_tokens for _, r in own) / len(own), abs=1e-4)
        for part in range(4):
            within = [r.solved for at, r in judged if at * 4 // 96 == part]
            assert task["by_time"][part] == (round(sum(within) / len(within), 4) if within else None)
        assert 0 < task["weight"] < 1
    assert found["x"] == [max(n // 3 for n in range(6 * end) if n % 3 == 0 and GROUPS[n].valid) for end in range(1, 5)]
    failed = [sum(r.failure is not None for r in rollouts[at : at + 24]) / 24 for at in range(0, 96, 24)]
    tools = {"engine": [round(share, 4) for share in failed]}
    for name in ("", "search", "é"):
        parts = [[t for r in rollouts[at : at + 24] for t in r.tool_times if t.name == name] for at in range(0, 96, 24)]
        assert all(parts), "else nothing is seen of shares"
        tools[name or "a tool there isn't"] = [round(sum(t.error for t in part) / len(part), 4) for part in parts]
    assert found["tools"] == tools
    row = watched.newest_of_task("task-3")
    assert row is not None
    assert names[row] == "task-3"
    assert "task-3" not in names[row + 1 :]
    watched.close()
