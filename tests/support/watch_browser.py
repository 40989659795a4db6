"""A real Chromium on the page of `headway watch`, which notes whatever goes wrong on it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlencode

from watch_server import WatchServer

CHROMIUM = Path("/usr/bin/chromium")
VIEWS = ("runs", "now", "run", "rollouts", "rollout", "tasks", "devices", "compare")
SETTLE_S = 30.0
_QUIET_MS = 150  # without a request under way
_NOTED = {"error", "warning"}  # of the console
_UNREADY = re.compile(r"\bundefined\b|\bNaN\b|\[object |Invalid Date")
_OBSERVER = """
window.__violations = [];
document.addEventListener('securitypolicyviolation', (event) => {
  window.__violations.push(`${event.violatedDirective} ${event.blockedURI}`);
});
"""
# What hostile text would leave behind in a page where it isn't inert.
INERT = """() => ({
  pwned: window.__pwned ?? null,
  made: document.querySelectorAll('main script, main iframe, main img, main style, main object, main embed').length,
  links: [...document.querySelectorAll('a, form, area')].map((a) => a.href ?? a.action)
    .filter((href) => !href.startsWith(location.origin)),
  handlers: [...document.querySelectorAll('*')].filter((node) =>
    [...node.attributes].some((attribute) => /^on/i.test(attribute.name))).length,
})"""
NOTHING = {"pwned": None, "made": 0, "links": [], "handlers": 0}


def lacking() -> str:
    """The reason why no browser can be started here; "": one can."""
    if not CHROMIUM.exists():
        return f"there is no {CHROMIUM}: make system-packages"
    missing = [name for name in ("playwright", "axe_playwright_python") if find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


@contextmanager
def browser() -> Iterator[Any]:
    """Start Debian's Chromium without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu"])
        try:
            yield chromium
        finally:
            chromium.close()


class PageFile:
    """A page that is a file, in the place of a server."""

    def __init__(self, path: Path) -> None:
        self.address = path.as_uri()

    def page(self, view: str, **parameters: Any) -> str:
        return f"{self.address}#/{view}?{urlencode(parameters)}"


def open_page(chromium: Any, path: Path) -> WatchedPage:
    """A user's page on a file that `headway report --html` wrote."""
    server: Any = PageFile(path)
    return WatchedPage(chromium, server)


class WatchedPage:
    """A page of its own user, with an empty store. ``faults``: console errors and warnings, exceptions, requests that
    failed or left the server, dialogs, in the order they came."""

    def __init__(self, chromium: Any, server: WatchServer, scheme: Literal["light", "dark"] = "light") -> None:
        self.server = server
        self.faults: list[str] = []
        self._under_way = 0
        self.context = chromium.new_context(
            color_scheme=scheme, reduced_motion="reduce", viewport={"width": 1280, "height": 860}
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(SETTLE_S * 1000)
        self.page.add_init_script(_OBSERVER)
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.faults.append(f"exception: {error}"))
        self.page.on("dialog", self._on_dialog)
        self.page.on("popup", lambda popup: self.faults.append(f"popup: {popup.url}"))
        self.page.on("request", self._on_request)
        self.page.on("requestfinished", lambda request: self._ended(request))
        self.page.on("requestfailed", self._on_failure)
        self.page.on("response", self._on_response)

    def open(self, view: str, **parameters: Any) -> str:
        """Go to a view as a link does, wait until it is there, and return its text."""
        self.page.evaluate("() => document.querySelector('main')?.setAttribute('data-left', '')")
        address = self.server.page(view, **parameters)
        if self.page.url == address:
            self.page.reload()  # going there would do nothing
        else:
            self.page.goto(address)
        return self.settled(view)

    def settled(self, view: str) -> str:
        """Wait until ``view`` has its heading and no request is under way; returns its text."""
        main = self.page.locator(f"main.view-{view}:not([data-left])")
        main.locator("h1").first.wait_for()
        deadline, quiet_ms = time.monotonic() + SETTLE_S, 0
        while quiet_ms < _QUIET_MS:
            assert time.monotonic() < deadline, f"{self._under_way} requests still under way at {self.page.url}"
            self.page.wait_for_timeout(50)
            quiet_ms = 0 if self._under_way else quiet_ms + 50
        return main.inner_text()

    def require_sound(self, text: str, *, where: str = "") -> None:
        """Nothing went wrong since the last call, and the view says something."""
        place = where or self.page.url
        faults, self.faults[:] = list(self.faults), []
        assert not faults, f"{place}: {faults}"
        assert not self.page.evaluate("() => window.__violations"), place
        assert len(text) > 30, f"{place} is blank: {text!r}"
        assert "Traceback" not in text, f"{place}: {text}"
        unready = _UNREADY.search(text)
        assert unready is None, f"{place}: {text[max(0, unready.start() - 100) : unready.end() + 100]!r}"

    def accessibility(self) -> list[str]:
        """Serious and critical findings of axe, a line each."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page).response["violations"]
        return [
            f"{one['id']} ({one['impact']}): {one['help']}: {node['html'][:200]} {node.get('failureSummary', '')[:300]}"
            for one in found
            if one["impact"] in ("serious", "critical")
            for node in one["nodes"][:5]
        ]

    def close(self) -> None:
        self.context.close()

    def _on_console(self, message: Any) -> None:
        if message.type in _NOTED:
            self.faults.append(f"console {message.type}: {message.text}")

    def _on_dialog(self, dialog: Any) -> None:
        self.faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _on_request(self, request: Any) -> None:
        self._under_way += not _streams(request)
        if not request.url.startswith((self.server.address, "data:", "blob:")):
            self.faults.append(f"a request elsewhere: {request.url}")

    def _on_response(self, response: Any) -> None:
        if response.status >= 400:
            self.faults.append(f"{response.status}: {response.url}")

    def _on_failure(self, request: Any) -> None:
        self._ended(request)
        if "ERR_ABORTED" not in (request.failure or ""):  # the page's own doing, as it leaves a view
            self.faults.append(f"failed: {request.url}: {request.failure}")

    def _ended(self, request: Any) -> None:
        self._under_way -= not _streams(request)


def _streams(request: Any) -> bool:
    return "/api/stream" in request.url
