"""docs/coming-from.md: its tables against sixteen published configurations of other projects, and the schema."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, get_origin

import pytest

from headway.config.load import section_of, validate_experiment
from headway.config.schema import Experiment

ROOT = Path(__file__).parents[3]
PEERS = ("TRL", "verl", "prime-rl", "slime")
OURS = re.compile(r"[a-z]+(?:\.[a-z0-9_]+)+")
CONFIGURATIONS: list[dict[str, Any]] = json.loads((ROOT / "tests/golden/coming_from.json").read_text(encoding="utf-8"))
NEEDED = {"run.directory": "runs/x", "model.path": "models/x", "tasks.train.path": "tasks.jsonl"}


class Row(NamedTuple):
    """A row of a peer's first table."""

    theirs: tuple[str, ...]  # (): of every run
    ours: tuple[str, ...]
    same: bool  # the value is carried over


def cells(part: str, head: str) -> list[list[str]]:
    """The rows of the table in ``part`` whose first heading is ``head``."""
    table = part.partition(f"| {head} |")[2].partition("\n\n")[0]
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


@functools.cache
def rows(peer: str) -> tuple[Row, ...]:
    found: list[Row] = []
    for theirs, ours, how in cells(part_of(peer), peer):
        keys = tuple(re.findall(r"`([^`]+)`", theirs))
        assert keys or theirs.startswith("*every run*"), theirs
        found.append(Row(keys, tuple(re.findall(r"`([^`]+)`", ours)), how.startswith("=")))
    return tuple(found)


@functools.cache
def part_of(peer: str) -> str:
    page = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
    return page.partition(f"\n## {peer}\n")[2].partition("\n## ")[0]


@functools.cache
def set_aside(peer: str) -> tuple[str, ...]:
    """Keys, with wildcards, that a peer's page says aren't needed or have no counterpart."""
    named = [row[0] for head in ("not needed", "no counterpart") for row in cells(part_of(peer), head)]
    return tuple(key for cell in named for key in re.findall(r"`([^`]+)`", cell))


def row_of(peer: str, key: str) -> Row | None:
    return next((row for row in rows(peer) if any(fnmatchcase(key, pattern) for pattern in row.theirs)), None)


def unindexed(key: str) -> str:
    return re.sub(r"\.\d+\.", ".", key)


def named(ours: tuple[str, ...], key: str) -> bool:
    return any(unindexed(key) == name or unindexed(key).startswith(f"{name}.") for name in ours)


def raw_of(flat: dict[str, Any]) -> dict[str, Any]:
    """The mapping of an experiment file: tables from dotted keys, lists where their names are numbers."""
    raw: dict[str, Any] = {}
    for key, value in flat.items():
        *tables, last = key.split(".")
        node = raw
        for name in tables:
            node = node.setdefault(name, {})
        node[last] = value
    for split, source in raw["tasks"].items():
        if "0" in source:
            raw["tasks"][split] = [source[number] for number in sorted(source) if number.isdecimal()]
    return raw


def title(configuration: dict[str, Any]) -> str:
    return f"{configuration['peer']}: {configuration['path']}"


def test_at_least_three_configurations_of_each_peer() -> None:
    counts = Counter(one["peer"] for one in CONFIGURATIONS)
    assert set(counts) == set(PEERS)
    assert min(counts.values()) >= 3
    for one in CONFIGURATIONS:
        assert re.fullmatch(r"[0-9a-f]{40}", one["commit"]), title(one)
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", one["repository"]), title(one)


@pytest.mark.parametrize("one", CONFIGURATIONS, ids=title)
def test_every_key_they_set_is_on_the_page(one: dict[str, Any]) -> None:
    aside = set_aside(one["peer"])
    unknown = [key for key in one["sets"] if row_of(one["peer"], key) is None]
    assert [key for key in unknown if not any(fnmatchcase(key, pattern) for pattern in aside)] == []


@pytest.mark.parametrize("one", CONFIGURATIONS, ids=title)
def test_translation_is_what_the_page_says(one: dict[str, Any]) -> None:
    """Each key of the translation follows from a row, and what the page carries over arrives."""
    used = [row for key in one["sets"] if (row := row_of(one["peer"], key)) is not None]
    used += [row for row in rows(one["peer"]) if not row.theirs]
    assert [key for key in one["headway"] if not any(named(row.ours, key) for row in used)] == []
    for key, value in one["sets"].items():
        row = row_of(one["peer"], key)
        if row is not None and row.same and key not in one.get("left_out", {}):
            assert one["headway"].get(row.ours[0]) == value, (key, row.ours[0])


@pytest.mark.parametrize("one", CONFIGURATIONS, ids=title)
def test_translation_is_a_valid_experiment(one: dict[str, Any]) -> None:
    tasks = any(key.startswith("tasks.train.") and key.endswith((".path", ".name")) for key in one["headway"])
    needed = {key: value for key, value in NEEDED.items() if not (tasks and key.startswith("tasks."))}
    validate_experiment(raw_of(needed | one["headway"]), title(one))


@pytest.mark.parametrize("peer", PEERS)
def test_keys_of_ours_that_the_page_names_exist(peer: str) -> None:
    assert rows(peer)
    assert [key for row in rows(peer) for key in row.ours if not exists(key)] == []
    text = " ".join(how for _, _, how in cells(part_of(peer), peer))
    sections = "|".join(Experiment.model_fields)
    assert [key for key in re.findall(rf"`((?:{sections})\.[a-z0-9_.]+)`", text) if not exists(key)] == []


@pytest.mark.parametrize("peer", PEERS)
def test_no_key_of_theirs_has_two_rows(peer: str) -> None:
    keys = [key for row in rows(peer) for key in row.theirs] + list(set_aside(peer))
    assert [key for key, count in Counter(keys).items() if count > 1] == []
    assert [key for key in keys if key in set_aside(peer) and row_of(peer, key) is not None] == []


def exists(key: str) -> bool:
    """Whether ``key`` is one of an experiment's; below a table of free names (engine_arguments) all are."""
    annotation: Any = Experiment
    for name in key.split("."):
        section = section_of(annotation)
        if section is None:
            return annotation is dict or get_origin(annotation) is dict
        if name not in section.model_fields:
            return False
        annotation = section.model_fields[name].annotation
    return bool(OURS.fullmatch(key))


def test_existence_is_told_from_the_schema() -> None:
    assert exists("queue.budget")
    assert exists("model.adapter.rank")
    assert exists("generator.engine_arguments.tensor_parallel_size")
    assert not exists("queue.budgt")
    assert not exists("queue.budget.x")
