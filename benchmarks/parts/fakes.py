"""The launcher of fake engines, which the tests own (tests/support/fake_worker.py)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import fake_worker as fake_worker
from fake_worker import FakeLauncher as FakeLauncher
from fake_worker import FakeWorker as FakeWorker
