"""`headway plan --graph`: what it prints, and what it refuses with exit code 2."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.cli.main import main as headway

PROBLEM: dict[str, Any] = {
    "workflow": {
        "items": 4,
        "granularities": [1],
        "stages": [
            {
                "name": "generate",
                "times": [{"device": "h200", "devices": 1, "items": n, "seconds": 2 * n} for n in (1, 4)],
            },
            {"name": "train", "times": [{"device": "h200", "devices": 1, "items": n, "seconds": n} for n in (1, 4)]},
        ],
        "edges": [{"from": "generate", "to": "train"}],
    },
    "pool": {"classes": [{"device": "h200", "devices": 2, "memory_bytes": 1e9, "usd_per_hour": 3600}]},
}


def written(tmp_path: Path, problem: object) -> str:
    file = tmp_path / "graph.json"
    file.write_text(problem if isinstance(problem, str) else json.dumps(problem), encoding="utf-8")
    return str(file)


def test_plan_is_printed_as_json_and_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    graph = written(tmp_path, PROBLEM)
    assert headway(["plan", "--graph", graph, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["plan"]["mode"] == "spatial"
    assert report["plan"]["seconds"] == 2 * 4 + 1
    assert report["plan"]["gap"] == 0
    assert report["second_best"]["value"] == 12
    assert headway(["plan", "--graph", graph, "--objective", "cost"]) == 0
    printed = capsys.readouterr().out
    assert "temporal, 12 s a step, $12; proven best" in printed
    assert "one more h200" in printed


def test_the_example_is_planned_as_the_page_shows(capsys: pytest.CaptureFixture[str]):
    root = Path(__file__).parents[3]
    assert headway(["plan", "--graph", str(root / "examples" / "placement" / "hybrid.json")]) == 0
    page = " ".join((root / "docs" / "planning.md").read_text(encoding="utf-8").split())
    assert " ".join(capsys.readouterr().out.split()) in page


def stage(problem: dict[str, Any], number: int = 0) -> dict[str, Any]:
    return problem["workflow"]["stages"][number]


def cyclic(problem: dict[str, Any]) -> None:
    problem["workflow"]["edges"].append({"from": "train", "to": "generate"})


def wrong(**edge: object) -> Callable[[dict[str, Any]], None]:
    return lambda problem: problem["workflow"]["edges"][0].update(edge)


BAD: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (cyclic, "stages generate, train form a cycle without a loop variable"),
    (wrong(to="trian"), "edges: to = 'trian': unknown; did you mean 'train'?"),
    (wrong(loop="turns"), "edge generate -> train: loop = 'turns': unknown; valid: none is declared"),
    (wrong(bytes_per_item=-1), "Expected `float` >= 0.0 - at `$.workflow.edges[0].bytes_per_item`"),
    (wrong(bytes_per_item=1), "pool.link_bytes_per_s: missing"),
    (lambda p: stage(p)["times"][0].update(device="h20"), "device = 'h20': unknown; did you mean 'h200'?"),
    (lambda p: stage(p)["times"][0].update(seconds=-1), ">= 0.0 - at `$.workflow.stages[0].times[0].seconds`"),
    (lambda p: stage(p)["times"][0].pop("seconds"), "required field `seconds` - at `$.workflow.stages[0].times[0]`"),
    (lambda p: stage(p).update(swich_s=1), "field `swich_s` - at `$.workflow.stages[0]`; did you mean 'switch_s'?"),
    (lambda p: stage(p).update(times=[]), "Expected `array` of length >= 1 - at `$.workflow.stages[0].times`"),
    (lambda p: stage(p).update(name="train"), "stages: train, train; valid: at least one, each name once"),
    (lambda p: stage(p).update(fixed_bytes=3e9), "on each of 1 h200 for 1 items and has 1e+09: 2e+09 missing"),
    (lambda p: p["workflow"].update(granularities=[3]), "granularities: 3 doesn't divide items = 4"),
    (lambda p: p["workflow"].update(loops=[{"name": "x", "rounds": 0}]), ">= 1 - at `$.workflow.loops[0].rounds`"),
    (lambda p: p["workflow"].update(loops=[{"name": "x", "rounds": 2}]), "loop 'x': no cycle goes through its edges"),
    (lambda p: p["pool"]["classes"][0].pop("usd_per_hour"), "pool: h200: usd_per_hour: missing"),
    (lambda p: p["pool"]["classes"][0].update(devices=0), "Expected `int` >= 1 - at `$.pool.classes[0].devices`"),
    (lambda p: p.pop("pool"), "missing required field `pool`"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_graphs_are_refused_with_exit_code_2(
    spoil: Callable[[dict[str, Any]], object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    problem = copy.deepcopy(PROBLEM)
    spoil(problem)
    graph = written(tmp_path, problem)
    assert headway(["plan", "--graph", graph, "--objective", "cost"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {graph}: ")
    assert message in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--graph", "{tmp}/none.json"], "can't be read: No such file or directory"),
        (["--graph", "{tmp}/graph.json", "--objective", "fame"], "--objective fame: valid: time, cost"),
        (["--graph", "{tmp}/graph.json", "--tolerance", "1"], "--tolerance 1.0: valid: 0 to less than 1"),
        (["--graph", "{tmp}/text.json"], "is not valid JSON"),
    ],
)
def test_bad_options_and_files_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    written(tmp_path, PROBLEM)
    (tmp_path / "text.json").write_text("stages:", encoding="utf-8")
    assert headway(["plan", *(part.format(tmp=tmp_path) for part in arguments)]) == 2
    assert message in capsys.readouterr().err
