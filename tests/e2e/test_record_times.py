"""What a run of several turns writes of its times: model calls and tools in the record, engine steps in the trace."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from clerk import WAIT_S

from headway.records.trace import EngineSteps, Span
from headway.telemetry.rollouts.reader import RolloutRecord
from headway.telemetry.trace_file import read_trace

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]


@pytest.mark.slow
def test_turns_tools_and_engine_steps_of_a_run(tmp_path: Path) -> None:
    tiny_run.write_inputs(tmp_path)
    config = tiny_run.write_experiment(
        tmp_path,
        model={"path": str(tmp_path / "model"), "template": "chat"},
        environment={"name": "clerk:Clerk"},
        rollout={"max_prompt_tokens": 100, "max_response_tokens": 300},
    )
    command = tiny_run.train(config)
    assert command.process.returncode == 0, command.output
    run = command.run
    rows: list[dict[str, Any]] = [row for _, batch in RolloutRecord(run).batches() for row in batch.to_pylist()]
    whole = [row for row in rows if row["verified"] and row["failure"] is None and row["turns"] == 3]
    assert len(whole) >= 4 * 4 * 6 // 3, "an untrained model ends too few of its rollouts by itself"
    for row in whole:
        calls = list(zip(row["call_starts_s"], row["call_first_tokens_s"], row["call_ends_s"], strict=True))
        assert len(calls) == 3
        assert all(start_s < first_s <= end_s for start_s, first_s, end_s in calls)
        assert sum(row["call_tokens"]) == sum(row["response_mask"])
        assert row["tool_names"] == ["begin", "wait", "wait", "wait"]
        assert row["tool_errors"] == [False, False, True, False]
        tools = list(zip(row["tool_starts_s"], row["tool_ends_s"], strict=True))
        assert all(end_s - start_s >= WAIT_S for start_s, end_s in tools[1:])
        turns = [tools[0], *itertools.chain.from_iterable(zip(((a, c) for a, _, c in calls), tools[1:], strict=True))]
        times = [time_s for pair in turns for time_s in pair]
        assert times == sorted(times), "calls and tools take turns"
        assert row["opened_s"] <= times[0]
        assert times[-1] <= row["generated_s"]

    lines = read_trace(run)
    steps = [row for line in lines if isinstance(line, EngineSteps) for row in line.rows]
    busy = [span for span in lines if isinstance(span, Span) and span.track == "generator-0" and span.name == "busy"]
    assert sum(step.tokens for step in steps) >= sum(sum(row["call_tokens"]) for row in rows)
    ends_s = [step.end_s for step in steps]
    assert ends_s == sorted(ends_s)
    assert min(span.start_s for span in busy) < ends_s[0]
    assert ends_s[-1] <= max(span.end_s for span in busy) + 0.001
    assert {step.version for step in steps} <= set(range(7))
    assert max(step.running for step in steps) > 1

    exported = tmp_path / "out.jsonl"
    tiny_run.output_of("export", run, "--to", "jsonl", "-o", exported)
    lines_out = [json.loads(line) for line in exported.read_text().splitlines()]
    assert [line["tool_ends_s"] for line in lines_out] == [row["tool_ends_s"] for row in rows]
