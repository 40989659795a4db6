"""Verifiers' judgements of one response, and what `headway check` says of a reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bare_model import write_bare_model

from headway.cli import main as cli
from headway.config.sources import VerifierSettings
from headway.records.task import Task
from headway.rollout.verification.scorers import score_guarded
from headway.rollout.verification.verifiers import resolve_verifier

# right for every verifier: the response earns it, doesn't, or the task is refused because of its reference
SOLVED, WRONG, REFUSED = "solved", "wrong", "refused"


def judged(name: str, answer: str, response: str, **parameters: Any) -> str:
    scorer = resolve_verifier(VerifierSettings(name=name, parameters=parameters))
    verdict = score_guarded(scorer, Task(task_id="t", prompt="p", answer=answer), response)
    if verdict.failure is not None:
        return REFUSED
    return SOLVED if verdict.solved else WRONG


def left_out(folder: Path, name: str, answer: str, capsys: pytest.CaptureFixture[str], **parameters: Any) -> bool:
    """Whether `headway check` refuses a file of two tasks whose second has this reference."""
    write_bare_model(folder / "model")
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "the other=", "answer": answer}]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = "".join(f"{key} = {json.dumps(value)}\n" for key, value in parameters.items())
    (folder / "e.toml").write_text(
        f'[run]\ndirectory = "{folder / "run"}"\n[model]\npath = "{folder / "model"}"\n'
        f'[tasks.train]\npath = "{folder / "tasks.jsonl"}"\n[verifier]\nname = "{name}"\n'
        f"[verifier.parameters]\n{given}[trainer]\nlearning_rate = 1e-4\n"
    )
    code = cli.main(["check", str(folder / "e.toml"), "--no-calibrate"])
    assert code in (0, 2), capsys.readouterr()
    return code == 2
