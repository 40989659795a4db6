"""Model cards: what was measured of the exported weights, and nothing of the user's own overwritten."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import yaml

from headway.orchestrator.evaluation import Evaluations
from headway.orchestrator.jobs.model_card import write_merge_card, write_run_card, write_sft_card
from headway.records.errors import ConfigurationError
from headway.trainer.checkpoints import CARD_FILE, CARD_MARK, CheckpointState, require_replaceable, write_folder

RECORDED = Path(__file__).parents[2] / "fixtures" / "run_folders"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The recorded run that ended, with best weights of version 4."""
    shutil.copytree(RECORDED / "ended", tmp_path / "run")
    (tmp_path / "run" / "best" / "state.json").write_bytes(msgspec.json.encode(CheckpointState(version=4).sealed()))
    return tmp_path / "run"


def front_matter(folder: Path) -> tuple[dict[str, object], str]:
    _, head, text = (folder / CARD_FILE).read_text().split("---\n", 2)
    return yaml.safe_load(head), text


def rows(text: str) -> dict[str, str]:
    cells = [line.strip("| ").split(" | ", 1) for line in text.splitlines() if line.startswith("| ")]
    return {parts[0].strip("`"): parts[-1] for parts in cells}


def test_card_of_a_run_has_what_was_measured_of_its_weights(run: Path) -> None:
    assert write_run_card(run / "best", run, price=3600.0)
    head, text = front_matter(run / "best")
    assert head == {
        "base_model": "model",
        "license": "unknown",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["headway", "reinforcement-learning", "decoupled_ppo"],
    }
    found = rows(text)
    assert found["weights"] == "version 4 of 4"
    assert found["samples trained, until this version"] == "64"
    assert found["tokens trained, prompts included, until this version"] == "988"
    assert found["US dollars, until this version"] == "0.41"  # two devices, 0.2036 s
    assert found["algorithm.loss"] == "`decoupled_ppo`"
    assert found["tasks, train"] == "`tasks.jsonl`"
    assert "| validation | after training | version 4 | 12 | 12 | 0 | 0.833 | 0.613 to 1.000 |" in text
    assert "| validation | during training | version 2 |" not in text  # of other weights


def test_card_says_that_nothing_was_evaluated_and_no_price_without_one(run: Path) -> None:
    (run / "best" / "state.json").write_bytes(msgspec.json.encode(CheckpointState(version=3).sealed()))
    assert write_run_card(run / "best", run)
    text = (run / "best" / CARD_FILE).read_text()
    assert "These weights weren't evaluated in the run." in text
    assert "dollars" not in text


def test_own_card_is_replaced_and_a_users_kept(run: Path) -> None:
    assert write_run_card(run / "best", run)
    assert write_run_card(run / "best", run)
    (run / "best" / CARD_FILE).write_text("mine")
    assert not write_run_card(run / "best", run)
    assert (run / "best" / CARD_FILE).read_text() == "mine"


def test_license_is_the_bases_where_its_card_says_it(tmp_path: Path) -> None:
    base = tmp_path / "base"
    for folder in (base, tmp_path / "made"):
        folder.mkdir()
    (base / CARD_FILE).write_text("---\ntags: [x]\nlicense: apache-2.0\n---\n# Base\n")
    assert write_sft_card(tmp_path / "made", str(base), "data.jsonl", {"step": 7, "loss_mean": 0.5, "output": "made"})
    head, text = front_matter(tmp_path / "made")
    assert (head["license"], head["base_model"]) == ("apache-2.0", str(base))
    assert rows(text)["loss mean"] == "0.5"
    assert "License" not in text


def test_merged_model_has_the_numbers_of_the_adapters_run(run: Path, tmp_path: Path) -> None:
    (tmp_path / "merged").mkdir()
    assert write_merge_card(tmp_path / "merged", "model", run / "best")
    assert "| validation | after training | version 4 |" in (tmp_path / "merged" / CARD_FILE).read_text()
    (run / "ledger.jsonl").write_bytes(b"\x00\n\x00\n")
    assert write_merge_card(tmp_path / "merged", "mo`del|", run / "best")
    text = (tmp_path / "merged" / CARD_FILE).read_text()
    assert "Nothing was measured of it here." in text
    assert "`mo_del_`" in text


def test_a_better_models_folder_keeps_the_users_card_alone(tmp_path: Path) -> None:
    kept = object.__new__(Evaluations)
    kept._folder, kept._run = tmp_path, cast("Any", SimpleNamespace(event=lambda *told, **data: None))
    for card, expected in ((None, False), (CARD_MARK, False), ("mine", True)):
        if card is not None:
            (tmp_path / "best" / CARD_FILE).write_text(card)
        (tmp_path / "candidate").mkdir()
        kept._keep_as_best(4, 0.5)
        assert (tmp_path / "best" / CARD_FILE).exists() == expected


def test_sft_output_with_a_users_card_isnt_replaced(tmp_path: Path) -> None:
    output = tmp_path / "sft"
    write_folder(output, lambda folder: (folder / "weights").touch(), CheckpointState(version=1))
    write_sft_card(output, "base", "data.jsonl", {"step": 1})
    require_replaceable(output, "sft.output")
    (output / CARD_FILE).write_text("mine")
    with pytest.raises(ConfigurationError, match="would be removed"):
        require_replaceable(output, "sft.output")
