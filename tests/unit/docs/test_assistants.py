"""What assistants read: docs/llms.txt lists every page; the skill has the Agent Skills form and names what exists."""

from __future__ import annotations

import re

import pytest

from docs.write_llms import lines, repeats
from headway.config.schema import Experiment
from tests.unit.docs.test_coming_from import exists
from tests.unit.docs.test_docs_names import ROOT

LLMS = (ROOT / "docs" / "llms.txt").read_text(encoding="utf-8")
SKILL = ROOT / ".agents" / "skills" / "headway" / "SKILL.md"
TEXT = SKILL.read_text(encoding="utf-8")


def test_llms_is_what_its_command_writes() -> None:
    assert LLMS.splitlines() == list("\n".join(lines()).splitlines()), "python -m docs.write_llms > docs/llms.txt"


def test_llms_lists_every_page_with_a_line() -> None:
    listed = re.findall(r"^- \[[^\]]+\]\(([\w-]+\.md)\): \S", LLMS, re.MULTILINE)
    assert sorted(listed) == sorted({page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"})


def test_llms_says_of_no_page_its_name_alone() -> None:
    listed = re.findall(r"^- \[([^\]]+)\]\([\w-]+\.md\): (.+)$", LLMS, re.MULTILINE)
    assert len(listed) > 40
    assert [name for name, what in listed if repeats(name, what)] == []
    assert repeats("When is it equal?", "when it is equal: a table")
    assert not repeats("Kernels", "tasks for models that write kernels")


def test_llms_has_the_parts_of_its_format_in_order() -> None:
    title, quote, *rest = [line for line in LLMS.splitlines() if line]
    assert re.fullmatch(r"# \S.*", title)
    assert quote.startswith("> ")
    first = next(number for number, line in enumerate(rest) if line.startswith("## "))
    assert not any(line.startswith(("#", "-")) for line in rest[:first])
    assert all(re.match(r"## \S|- \[.+\]\(.+\)", line) for line in rest[first:])


def test_skill_is_in_its_format() -> None:
    opening, front, body = TEXT.split("---\n", 2)
    fields = dict(line.split(": ", 1) for line in front.splitlines())
    assert opening == ""
    assert fields["name"] == SKILL.parent.name
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", fields["name"])
    assert len(fields["name"]) <= 64
    assert 1 <= len(fields["description"]) <= 1024
    assert len(fields["compatibility"]) <= 500
    assert ": " not in fields["description"]  # else it isn't YAML
    assert len(body.splitlines()) < 500


def test_skill_names_pages_and_keys_that_exist() -> None:
    pages = re.findall(r"`([\w-]+\.md)(?:#[\w-]+)?`", TEXT)
    assert len(pages) >= 8
    assert [page for page in pages if not (ROOT / "docs" / page).is_file()] == []
    for link in re.findall(r"\]\(([^)]+)\)", TEXT):
        assert (SKILL.parent / link).resolve().is_file(), link
    keys = re.findall(rf"`((?:{'|'.join(Experiment.model_fields)})\.[a-z0-9_.]+)", TEXT)
    assert len(keys) >= 15
    assert [key for key in keys if not exists(key)] == []


@pytest.mark.parametrize("word", ["quickstart", "new", "check", "plan", "train", "report", "doctor", "show", "watch"])
def test_skill_covers_a_command(word: str) -> None:
    assert f"headway {word}" in TEXT
