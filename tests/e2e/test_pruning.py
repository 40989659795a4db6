"""Rollouts of a real model in real processes that end early, and what the ledger, the buffer and show say of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_run import audited, events_of, output_of, refused, steps_of, train, write_experiment, write_inputs

from headway.records.ledger import PrunerFigures

LONGEST = 600  # tokens; a random model hardly ever ends a response by itself


def figures_of(run: Path, pruner: str) -> PrunerFigures:
    return PrunerFigures.total(step.pruning[pruner] for step in steps_of(run) if pruner in step.pruning)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.mark.slow
def test_loops_are_stopped_and_trained_and_a_judge_of_ones_own_drops(inputs: Path, tmp_path: Path) -> None:
    """At a temperature near 0 a random model goes round in circles at once; some are audited to their end."""
    paths = {"model": {"path": str(inputs / "model")}, "tasks.train": {"path": str(inputs / "tasks.jsonl")}}
    config = write_experiment(
        tmp_path,
        **paths,
        rollout={"max_response_tokens": LONGEST, "temperature": 0.05},
        pruning={
            "audit_share": 0.2,
            "pruners": [
                {"kind": "repetition", "repeats": 10, "repeated_share": 1.0},
                {"kind": "verifier", "verifier": "odd"},
            ],
        },
        **{"verifiers.odd": {"name": "tiny_verifiers:odd_is_wrong"}},
    )
    ended = train(config)
    assert ended.process.returncode == 0, ended.output
    run = tmp_path / "run"
    audited(run)
    loops, judged = figures_of(run, "repetition"), figures_of(run, "verifier")
    assert loops.rollouts > 10
    assert loops.dropped == 0
    assert loops.saved_tokens > 50 * loops.rollouts
    assert loops.audits > 0
    assert judged.rollouts == judged.dropped > 0
    books = events_of(run, "accounting")[-1].data
    assert books["balanced"] == 1
    assert books["pruned"] >= judged.dropped
    kept = [json.loads(line) for line in output_of("show", run, "--json").splitlines()]
    stopped = [
        sample
        for sample in kept
        if sample["pruned"] and not sample["pruned"]["audited"] and sample["pruned"]["pruner"] == "repetition"
    ]
    stopped = [sample for sample in stopped if sample["step"] is not None]  # the run may end before the others' turn
    whole = [sample for sample in kept if sample["pruned"] and sample["pruned"]["audited"]]
    assert stopped
    assert all(s["finish_reason"] == "abort" and s["ending"] == "trained" for s in stopped)
    assert all(64 <= s["pruned"]["at_tokens"] <= sum(n for _, n in s["versions"]) < LONGEST for s in stopped)
    assert all(s["finish_reason"] in ("stop", "length") for s in whole)
    shown = " ".join(output_of("show", run).replace("│", " ").split())  # without the frames' line breaks
    assert "pruned by repetition at" in shown
    assert "tokens saved" in shown
    assert "audited, else pruned by repetition" in shown
    assert "rollouts ended early (" in " ".join(output_of("report", run).split())


def test_a_judge_that_is_not_there_is_refused(inputs: Path, tmp_path: Path) -> None:
    config = write_experiment(
        tmp_path,
        model={"path": str(inputs / "model")},
        **{
            "tasks.train": {"path": str(inputs / "tasks.jsonl")},
            "pruning": {"pruners": [{"kind": "value", "verifier": "judge"}]},
            "verifiers.judge": {"name": "no_such:judge"},
            "rollout": {"max_response_tokens": 100},
        },
    )
    assert "verifiers.judge.name = 'no_such:judge'" in refused("train", config, "--quiet")
