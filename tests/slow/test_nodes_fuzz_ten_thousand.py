"""Ten thousand attacks on each of the ports for other machines."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from node_fuzz_cases import attack_a_mirror, attack_the_orchestrator

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

CASES = 10_000


def test_the_orchestrators_port_takes_ten_thousand_attacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asyncio.run(attack_the_orchestrator(tmp_path, monkeypatch, CASES))


def test_a_mirrors_port_takes_ten_thousand_attacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asyncio.run(attack_a_mirror(tmp_path, monkeypatch, CASES))
