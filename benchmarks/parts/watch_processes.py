"""The `headway watch` process and the browser on its page, which the tests own (tests/support/watch_*.py)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from watch_browser import browser as browser
from watch_browser import lacking as lacking
from watch_browser import open_page as open_page
from watch_server import WatchServer as WatchServer
from watch_server import watch as watch
