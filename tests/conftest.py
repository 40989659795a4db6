"""Settings of all tests: processes that tests start import builders and hooks by their bare names."""

from __future__ import annotations

import os
from pathlib import Path

HERE = Path(__file__).resolve().parent
PATHS = [str(HERE / "support"), str(HERE / "e2e"), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in PATHS if path)
