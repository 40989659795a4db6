"""Pictures of the page for the README: ``python tests/support/watch_images.py RUNS docs/images [RUN [VIEW ...]]``.

Every view of RUN (default: the first in the list), or those named, in light and some in dark: watch-VIEW.png.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Literal

from watch_browser import WatchedPage, browser
from watch_server import WatchServer, watch

SIZE = {"width": 1280, "height": 860}
DARK = ("now", "rollout")  # views that are shown dark as well
COLOURS = {"light": "version", "dark": "logprob"}  # of a rollout's tokens
SETTLE_MS = 1500  # for plots and lanes to be drawn


def addresses(server: WatchServer, run: str) -> dict[str, dict[str, str | int]]:
    """Parameters of each view's address."""
    runs = [run, *[one["id"] for one in server.read("/api/runs")["runs"] if one["id"] != run]]
    solved = server.read("/api/rollouts", run=run, solved="true", order="-tokens", limit=20)["rows"]
    two_versions = [row for row in solved if row["first_version"] != row["last_version"]]
    row = (two_versions or solved)[0]["row"]
    return {
        "runs": {},
        "now": {"run": run},
        "run": {"run": run},
        "rollouts": {"run": run},
        "rollout": {"run": run, "row": row},
        "tasks": {"run": run},
        "devices": {"run": run},
        "compare": {"runs": ",".join(runs[:2])},
    }


def main(root: Path, output: Path, run: str = "", *only: str) -> None:
    output.mkdir(parents=True, exist_ok=True)
    schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    with tempfile.TemporaryDirectory() as cache, watch(root, cache=Path(cache)) as server, browser() as chromium:
        views = addresses(server, run or server.read("/api/runs")["runs"][0]["id"])
        for scheme in schemes:
            page = WatchedPage(chromium, server, scheme)
            page.page.set_viewport_size(SIZE)
            for view, parameters in views.items():
                if view in (only or views) and (scheme == "light" or view in DARK):
                    if view == "rollout":
                        parameters["colour"] = COLOURS[scheme]
                    page.require_sound(page.open(view, **parameters))
                    page.page.wait_for_timeout(SETTLE_MS)
                    name = f"watch-{view}.png" if scheme == "light" else f"watch-{view}-dark.png"
                    page.page.screenshot(path=output / name)
                    print(output / name)
            page.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
