"""docs/troubleshooting.md has a section for every stall, alert and verdict that the code can print."""

from __future__ import annotations

import ast
import re
from typing import get_args

import pytest

from headway.config.alerts import AlertRule
from headway.records.check_report import Constraint
from headway.records.ledger import EventRecord
from headway.report.incidents import event_detail
from headway.report.live_view import event_line
from headway.report.preview import CONSTRAINTS
from headway.report.verdict import Balance, judge
from headway.telemetry.pages import alert_page, stall_page, troubleshooting
from headway.telemetry.summary import summarise
from tests.unit.docs.test_docs_names import ROOT, anchors, prose

PAGE = ROOT / "docs" / "troubleshooting.md"
CODE = {file: file.read_text(encoding="utf-8") for file in sorted((ROOT / "headway").rglob("*.py"))}
ROLES = (
    "trainer", "generator", "verifier", "environment", "controller", "pictures", "mirror-b", "files-b",
    "accounting-copy", "agents",
)  # fmt: skip


def section(address: str) -> str:
    """The text of the section with an address of the page, without fenced blocks."""
    page, _, anchor = address.partition("#")
    assert page == "docs/troubleshooting.md"
    for part in re.split(r"^#+ ", prose(PAGE), flags=re.MULTILINE):
        title, _, text = part.partition("\n")
        if troubleshooting(title) == address:
            return text
    raise AssertionError(f"docs/troubleshooting.md has no section #{anchor}")


def kinds_of_waits() -> set[str]:
    """Kinds of waits that the code registers by a name of its own, and those of facts about workers."""
    texts = {file.relative_to(ROOT / "headway").as_posix(): text for file, text in CODE.items()}
    named = {kind for text in texts.values() for kind in re.findall(r"waits\.on\(\"([^\"{]+)\"", text)}
    device = re.search(r"^WAIT = \"(.+?)\"", texts["flow/device_locks.py"], re.MULTILINE)
    assert device
    stalls = texts["control/stalls.py"]
    facts = set(re.findall(r"kind = .*, \"([a-z ]+)\"", stalls)) | set(re.findall(r"kind=\"([a-z ]+)\"", stalls))
    assert len(named) >= 6
    assert len(facts) >= 4
    return named | facts | {device[1], "event loop"}


def printed_lines() -> list[str]:
    """Lines that the page shows as printed."""
    found = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in found for line in block.splitlines()]


def texts_in_code() -> set[str]:
    """Literal parts of the code's strings that are long enough to tell one message from another."""
    trees = (ast.parse(text) for text in CODE.values())
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    values = {node.value.strip() for node in nodes if isinstance(node.value, str)}
    return {value for value in values if len(value) >= 9 and "docs/" not in value and "." not in value}


@pytest.mark.slow
def test_lines_shown_are_the_codes() -> None:
    """Each line that the page shows has words of a message in it that the code can print."""
    lines, texts = printed_lines(), texts_in_code()
    assert len(lines) >= 40
    assert [line for line in lines if not any(text in line for text in texts)] == []


def test_addresses_are_those_of_headings() -> None:
    titles = re.findall(r"^#+ (.+)$", prose(PAGE), re.MULTILINE)
    assert {troubleshooting(title).partition("#")[2] for title in titles} == anchors(PAGE)
    assert len({title.lower() for title in titles}) == len(titles)
    assert stall_page("verifier.score") == "docs/troubleshooting.md#stall-verifier"
    assert stall_page("accounting-copy.apply").endswith("#stall-accounting")


@pytest.mark.parametrize("kind", sorted(kinds_of_waits() | {f"{role}.call" for role in ROLES}))
def test_every_stall_has_a_section(kind: str) -> None:
    assert section(stall_page(kind)).strip()


def test_roles_are_those_of_the_workers() -> None:
    """A worker under another name needs a section of its own; those of `check` are watched by nobody."""
    named = set(re.findall(r"WorkerSpec\((?:[^()]|\([^()]*\))*?name=f?\"([a-z]+)", "\n".join(CODE.values())))
    assert {"environment", "controller", "mirror", "accounting", "files"} <= named
    assert named - {role.partition("-")[0] for role in ROLES} == {"check"}


@pytest.mark.parametrize("rule", get_args(AlertRule))
def test_every_alert_has_a_section(rule: str) -> None:
    assert section(alert_page(rule)).strip()


@pytest.mark.parametrize("constraint", get_args(Constraint))
def test_every_constraint_has_a_section(constraint: Constraint) -> None:
    assert section(troubleshooting(f"Bound by {CONSTRAINTS[constraint]}")).strip()


@pytest.mark.parametrize("balance", get_args(Balance))
def test_every_balance_has_a_section(balance: str) -> None:
    assert section(troubleshooting(balance)).strip()


def test_pages_of_a_verdict_exist() -> None:
    text = CODE[ROOT / "headway/report/verdict.py"]
    titles = re.findall(r"^ {12}\"([A-Z].+)\": ", text.partition("def pages")[2].partition("return")[0], re.MULTILINE)
    assert len(titles) == 6
    assert all(section(troubleshooting(title)) for title in titles)
    assert judge([], summarise([]), 2).pages == []


def test_printed_lines_name_their_section() -> None:
    stalled = EventRecord(event="stalled", detail="stalled 3 s: x", data={"wait": "verifier.score"})
    assert event_detail(stalled) == "stalled 3 s: x (docs/troubleshooting.md#stall-verifier)"
    assert event_detail(EventRecord(event="stalled", detail="x")).endswith("#stall-event-loop)")
    alert = EventRecord(event="alert", detail="kl: too far", data={"rule": "kl"})
    assert event_line(alert) == "alert at version 0: kl: too far (docs/troubleshooting.md#alert-kl)"
    assert event_detail(EventRecord(event="end", detail="done")) == "done"
