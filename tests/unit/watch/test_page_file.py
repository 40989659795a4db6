"""`headway report --html`: what lies in the page of a run as one file; in a browser: e2e/test_page_in_one_file.py."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import watch_runs
from page_answers import answers_of, kept, words
from synthetic_run import evaluation, step_record, synthetic_lines, write_run

from headway.cli.main import main as headway
from headway.records.errors import ConfigurationError, HeadwayError
from headway.records.ledger import EventRecord, LedgerLine, StepRecord
from headway.records.rollout import ENDINGS
from headway.report.run_view import as_json, view_run
from headway.report.watch.rollouts.columns import RolloutTable
from headway.report.watch.rollouts.page_selection import select_rollouts, select_shared_tasks
from headway.services.watch.page_file import write_compared_page, write_run_page


class References(HTMLParser):
    """What a page refers to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "data", "action", "srcset")]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run_page(write_run(tmp_path_factory.mktemp("run"), synthetic_lines(60)))


def test_a_page_loads_nothing_from_elsewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert page.name == "report.html"
    assert all(reference.startswith(("#", "data:")) for reference in References(page).found)
    assert "default-src 'none'" in text
    imports = json.loads(re.search(r'<script type="importmap">(.*?)</script>', text)[1])["imports"]  # type: ignore[index]
    assert {"headway/app.js", "headway/views/report.js", "headway/vendor/uplot/uPlot.esm.js"} <= imports.keys()
    assert "@import" not in text


@pytest.mark.parametrize("name", ["ended", "killed", "interrupted", "other"])
def test_a_page_has_the_facts_of_the_report(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / name
    watch_runs.copy_recorded(name, run)
    assert headway(["report", str(run), "--html", str(tmp_path / "page.html"), "--usd-per-device-hour", "2.5"]) == 0
    said, found = capsys.readouterr().out, answers_of(tmp_path / "page.html")
    assert headway(["report", str(run), "--json", "--usd-per-device-hour", "2.5"]) == 0
    facts = json.loads(capsys.readouterr().out)
    printed = " ".join(said.split())
    for row in found["report"]["verdict"]:
        assert " ".join(f"{row['question']} {row['answer']}".split()) in printed
    assert {row["answer"] for row in found["report"]["verdict"]} == {
        text for key, text in facts["verdict"].items() if key.endswith("_text") and text
    }
    assert f"{facts['steps']:,} steps" in found["report"]["summary"]
    now = found["now"]
    assert (now["balance"], now["learning"]) == (facts["verdict"]["balance"], facts["verdict"]["learning"])
    assert facts["verdict"]["staleness_text"] in now["sentence"]
    assert now["waits"]["trainer"] == pytest.approx(facts["trainer_wait_ratio"])
    assert now["waits"]["generator"] == pytest.approx(facts["generator_wait_ratio"])
    rates = ("production", "effective_production", "consumption", "trained")
    assert [now["rates"][name] for name in rates] == [facts[f"{name}_per_s"] for name in rates]
    assert facts["verdict"]["cost_text"] == now["cost"]["text"]
    measured = [one for one in facts["evaluations"] if one["samples"]]
    shown = found["series"]["axes"]["steps"]["evaluations"]
    assert [one["solve_rate"] for one in shown] == [one["solve_rate"] for one in measured]


def test_a_page_has_verdict_evaluations_and_histograms(page: Path) -> None:
    text = words(page)
    for said in ("Generation-bound", "Within budget", "Yes: solve rate", "Yes: every rollout", "Nothing."):
        assert said in text
    for title in ("Evaluations", "Groups by share solved", "Staleness, whole run", "Events"):
        assert title in text
    assert "0.452 ± 0.022" in text
    titles = {one["title"] for one in answers_of(page)["names"]["series"]}
    assert {"Solve rate", "Who waits", "Queue depth", "Staleness", "Endings", "loss", "Weight updates"} <= titles


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [EventRecord(event="start")],
        [StepRecord(step=0, version=1)],
        [StepRecord(step=0, version=0, skipped=True, metrics={"loss": float("nan")})],
        [evaluation("before", 0, 0.5)],
    ],
)
def test_a_page_of_a_run_that_has_hardly_begun(tmp_path: Path, lines: list[LedgerLine]) -> None:
    assert answers_of(write_run_page(write_run(tmp_path, lines, budget=None)))["report"]["verdict"]
    json.dumps(as_json(view_run(tmp_path)), allow_nan=False)


def test_a_metric_of_ones_own_is_a_series(tmp_path: Path) -> None:
    lines = [step_record(step, metrics={"my_kl": 0.1 * step}) for step in range(4)]
    found = answers_of(write_run_page(write_run(tmp_path, lines)))
    assert found["series"]["series"]["loss/my_kl"]["mean"] == pytest.approx([0.0, 0.1, 0.2, 0.3])


def test_a_page_of_a_killed_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", synthetic_lines(30)[:-4])
    with (folder / "ledger.jsonl").open("ab") as file:
        file.write(b'{"kind":"step","st')
    text = words(write_run_page(folder, tmp_path / "out.html"))
    assert "stopped before its end" in text
    assert "Not closed yet" in text


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [StepRecord(step=0, version=1)])
    with pytest.raises(HeadwayError, match="can't be written"):
        write_run_page(folder, tmp_path / "nowhere" / "out.html")
    with pytest.raises(ConfigurationError, match="holds no run"):
        write_run_page(tmp_path / "nowhere")


# --- rollouts --------------------------------------------------------------------------------------------


def table_of(endings: list[str], tasks: list[str] | None = None) -> RolloutTable:
    names = sorted(set(tasks or ["t"]))
    return RolloutTable(
        {
            "group": np.arange(len(endings)),
            "member": np.zeros(len(endings), np.int32),
            "ending": np.array([ENDINGS.index(ending) for ending in endings], np.uint8),
            "solved": np.zeros(len(endings), np.bool_),
            "task": np.array([names.index(task) for task in tasks or ["t"] * len(endings)], np.int32),
        },
        names,
        0,
    )


def test_of_each_ending_the_newest_and_the_oldest_are_chosen() -> None:
    table = table_of(["failed", *["trained"] * 50, "filtered", *["trained"] * 48])
    assert select_rollouts(table, 6) == [99, 98, 51, 2, 1, 0]
    assert select_rollouts(table, 1000) == list(range(99, -1, -1))
    assert select_rollouts(table_of([]), 5) == []


def test_of_tasks_that_runs_share_each_has_its_newest_rollout() -> None:
    first, second = table_of(["trained"] * 4, ["a", "b", "a", "c"]), table_of(["trained"] * 3, ["c", "a", "d"])
    assert select_shared_tasks([first, second], 3) == [[3, 2], [1, 0]]
    assert select_shared_tasks([first, second], 1) == [[2], [1]]


def test_a_page_says_which_rollouts_and_tokens_it_lacks(tmp_path: Path) -> None:
    tokenizer = watch_runs.write_tokenizer(tmp_path / "tokenizer")
    run = watch_runs.write_hostile_run(tmp_path / "run", tmp_path / "tokenizer", tokenizer, long_tokens=9000)
    page = write_run_page(run)
    found, rollouts = answers_of(page), kept(page, "rollouts")["run"]
    assert {str(row["row"]) for row in found["rollouts"]["rows"]} == rollouts.keys()
    assert any("only the first tokens" in problem for problem in found["rollouts"]["problems"])
    assert all(len(one["ids"]) <= 4000 for row in rollouts.values() for one in row["sequences"])
    assert "Logs aren't in this file" in found["logs"]["problems"][0]


def test_several_runs_are_one_page(tmp_path: Path) -> None:
    for name in ("ended", "other"):
        watch_runs.copy_recorded(name, tmp_path / name)
    runs = [tmp_path / name for name in ("ended", "other", "none")]
    left_out = write_compared_page(runs, tmp_path / "page.html", 2.5)
    found = kept(tmp_path / "page.html")
    assert list(left_out) == [str(tmp_path / "none")]
    assert found["views"] == ["compare", "rollouts"]
    assert list(found["of"]) == ["ended", "other"]
    assert {"run.seed", "trainer.learning_rate"} <= found["compare"]["differences"].keys()
    assert list(found["of"]["ended"]["series"]["axes"]) == ["steps", "samples", "tokens", "hours", "dollars"]
    with pytest.raises(ConfigurationError, match="holds no run"):
        write_compared_page([tmp_path / "none"] * 2, tmp_path / "page.html")
