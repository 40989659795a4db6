"""The stop string that ended a response isn't part of the text that is scored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_run

DIGITS = "0123456789"


@pytest.mark.slow
@pytest.mark.parametrize(
    "stop",
    [["1"], [*DIGITS], ["+", "="], [a + b for a in DIGITS for b in DIGITS]],
    ids=["a digit", "any digit", "signs", "two digits"],
)
def test_what_is_scored_ends_before_the_stop_string(tmp_path: Path, stop: list[str]) -> None:
    tiny_run.write_inputs(tmp_path)
    config = tiny_run.write_experiment(
        tmp_path,
        run={"steps": 1},
        rollout={"stop": stop, "group_size": 8, "max_response_tokens": 100},
        verifier={"name": "written_responses:score", "parameters": {"file": str(tmp_path / "scored")}},
    )
    done = tiny_run.train(config)
    assert done.process.returncode == 0, done.output
    scored = [json.loads(line) for line in (tmp_path / "scored").read_text().splitlines()]
    assert len(scored) >= 32
    assert not [text for text in scored if any(one in text for one in stop)]
