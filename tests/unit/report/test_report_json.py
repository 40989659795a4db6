"""The report as JSON for machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from synthetic_run import evaluation, step_record, synthetic_lines, write_run

from headway.records.ledger import Distribution, LedgerLine
from headway.report.run_view import as_json, view_run
from headway.runtime.run_directory import RunDirectory


def test_json_has_what_machines_ask_for(tmp_path: Path) -> None:
    found = as_json(view_run(write_run(tmp_path, synthetic_lines(40))))
    json.dumps(found, allow_nan=False)
    expected = {
        "solve_rate_before": 0.452,
        "solve_rate_after": 0.93,
        "max_trajectory_staleness": 3,
        "accounting_balanced": True,
        "length_bias_ks": 0.02,
        "state": "finished",
        "staleness_budget": 4,
        "skipped_steps": 0,
        "best_version": 40,
    }
    assert {key: found[key] for key in expected} == expected
    assert found["trainer_wait_ratio"] == pytest.approx(0.25)
    assert 0.03 <= found["generator_wait_ratio"] <= 0.05
    assert found["verdict"]["balance"] == "generation-bound"
    assert found["mean_trajectory_staleness"] == pytest.approx(1.3)
    assert len(found["evaluations"]) == 4


def test_mean_token_staleness_weighs_tokens(tmp_path: Path) -> None:
    long = Distribution(mean=3.0, max=3, histogram={"3": 900})
    short = Distribution(mean=1.0, max=1, histogram={"1": 100})
    lines: list[LedgerLine] = [step_record(0, tokens__staleness=long), step_record(1, tokens__staleness=short)]
    found = as_json(view_run(write_run(tmp_path, lines)))
    assert found["mean_token_staleness"] == pytest.approx(0.9 * 3 + 0.1 * 1)


def test_json_has_no_nan(tmp_path: Path) -> None:
    lines = [step_record(0, rewards__mean=1.0), evaluation("before", 0, 0.5)]
    folder = write_run(tmp_path, lines)
    text = (folder / "ledger.jsonl").read_text().replace('"standard_error":0.02', '"standard_error":null,"x":0.02')
    (folder / "ledger.jsonl").write_text(text)
    found = as_json(view_run(folder))
    json.dumps(found, allow_nan=False)
    assert found["solve_rate_before_error"] is None


def test_a_run_that_goes_on_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path, synthetic_lines(5)[:-4])
    with RunDirectory(folder) as run:
        run.acquire()
        assert as_json(view_run(folder))["state"] == "running"
    assert as_json(view_run(folder))["state"] == "stopped"
