"""The page of `headway watch` in a real Chromium: every view of runs that live, died, went on, and of what is no run.

Skipped where Debian's chromium or playwright isn't there. The server alone: test_watch_server.py.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import tiny_run
import watch_browser
import watch_runs
import watch_server
from tiers import first
from watch_browser import VIEWS, WatchedPage
from watch_server import WatchServer

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(180),
    pytest.mark.skipif(bool(watch_browser.lacking()), reason=watch_browser.lacking()),
]

watch = partial(watch_server.watch, warm=True)
HOSTILE_RUN = "hostile"
STEPS = 1_000_000
SHOWS_STEP = "(least) => Number(/\\bstep (\\d+)/.exec(document.querySelector('main').innerText)?.[1]) >= least"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("watch")


@pytest.fixture(scope="module")
def root(folder: Path) -> Path:
    """A folder of runs: one that attacks the page, and many that are damaged."""
    tokenizer = watch_runs.write_tokenizer(folder / "tokenizer")
    run = watch_runs.write_hostile_run(folder / "runs" / HOSTILE_RUN, folder / "tokenizer", tokenizer)
    watch_runs.write_damaged_runs(folder / "runs", run)
    run.with_name(watch_runs.HOSTILE_NAME).symlink_to(run)  # not followed where runs are looked for
    named = folder / "runs" / f"{watch_runs.HOSTILE_NAME} & 'more' \"?#%2e"
    watch_runs.write_hostile_run(named, folder / "tokenizer", tokenizer, long_tokens=watch_runs.LONG_TOKENS)
    return folder / "runs"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with watch_browser.browser() as started:
        yield started


@pytest.fixture(scope="module")
def server(root: Path, folder: Path) -> Iterator[WatchServer]:
    with watch(root, cache=folder / "cache") as started:
        yield started


@pytest.fixture(scope="module")
def opened(chromium: Any) -> Iterator[Callable[..., WatchedPage]]:
    """Pages by server and colour scheme, which tests share: opening one takes seconds."""
    pages: dict[tuple[int, str], WatchedPage] = {}

    def page(server: WatchServer, scheme: Literal["light", "dark"] = "light") -> WatchedPage:
        if (server.port, scheme) not in pages:
            pages[server.port, scheme] = WatchedPage(chromium, server, scheme)
        return pages[server.port, scheme]

    yield page
    for one in pages.values():
        one.close()


def parameters_of(view: str, run: str, other: str = HOSTILE_RUN) -> dict[str, str | int]:
    """Parameters of a view's address that show ``run``."""
    if view == "runs":
        return {}
    if view == "compare":
        return {"runs": f"{run},{other}"}
    return {"run": run} | ({"row": 1} if view == "rollout" else {})


def walk(page: WatchedPage, run: str, *, axe: bool = False, other: str = HOSTILE_RUN) -> dict[str, str]:
    """Open every view of ``run`` and require each to be sound; their texts."""
    texts: dict[str, str] = {}
    for view in VIEWS:
        texts[view] = page.open(view, **parameters_of(view, run, other))
        page.require_sound(texts[view])
        if axe:
            assert page.accessibility() == [], view
    return texts


# --- runs that live, died, went on -----------------------------------------------------------------------


@contextmanager
def training(config: Path, *options: str) -> Iterator[tiny_run.Command]:
    """A tiny `headway train`, killed with the block."""
    with tiny_run.headway("train", config, "--quiet", *options, run=config.parent / "run") as command:
        yield command


def steps_beyond(command: tiny_run.Command, steps: int) -> None:
    command.until(lambda: len(tiny_run.steps_of(command.run)) >= steps, f"{steps} steps")


@pytest.mark.slow
def test_views_of_a_run_that_lives_is_killed_and_is_resumed(
    folder: Path, chromium: Any, opened: Callable[..., WatchedPage]
) -> None:
    live = folder / "live"
    live.mkdir()
    tiny_run.write_inputs(live)
    config = tiny_run.write_experiment(live, run={"directory": str(live / "run"), "steps": STEPS})
    with watch(live, cache=folder / "cache-live") as server:
        page = opened(server)
        page.require_sound(page.open("runs"))  # nothing is there yet
        with training(config) as command:
            steps_beyond(command, 4)
            command.until(lambda: server.read("/api/runs")["runs"], "the run in the list")  # looked for now and then
            (found,) = server.read("/api/runs")["runs"]
            assert found["state"] == "running"
            run = found["id"]
            walk(page, run, other=run)
            page.open("now", run=run)
            step = len(tiny_run.steps_of(command.run)) + 4
            page.page.wait_for_function(SHOWS_STEP, arg=step)  # by itself, as the server's events come
            page.require_sound(page.page.locator("main").inner_text())
            command.process.send_signal(signal.SIGKILL)
            command.wait()
            tiny_run.wait_for_exits(command)
        assert server.read("/api/runs")["runs"][0]["state"] == "died"
        assert "died" in walk(page, run, other=run)["runs"]
        steps = len(tiny_run.steps_of(live / "run"))
        with training(config, "--resume") as command:
            steps_beyond(command, steps + 3)
            assert server.read("/api/now", run=run)["state"] == "running"
            command.until(lambda: server.read("/api/runs")["runs"][0]["state"] == "running", "the list's next look")
            texts = walk(page, run, other=run)
            assert "running" in texts["runs"]
            tasks = page.open("tasks", run=run)
            assert any(f"{a}+" in tasks for a in range(10, 30)), tasks  # the prompts of its tasks
    assert "Traceback" not in server.log.read_text()


# --- what is no run --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_empty_folder_says_what_would_fill_it(folder: Path, opened: Callable[..., WatchedPage]) -> None:
    (folder / "nothing").mkdir()
    with watch(folder / "nothing", cache=folder / "cache-empty") as server:
        page = opened(server)
        for view in VIEWS:
            text = page.open(view)
            assert page.page.locator("main .empty, main .problem").count(), f"{view}: {text}"
            page.require_sound(text, where=view)
        assert str(folder / "nothing") in page.open("runs"), "where it looked"
    assert "Traceback" not in server.log.read_text()


DAMAGED_FIRST = ("garbage-in-segment", "older-ended", "only-an-epoch")
DAMAGED = (*DAMAGED_FIRST, *sorted({*watch_runs.DAMAGE, "older-killed", "older-interrupted"} - {*DAMAGED_FIRST}))


@pytest.mark.slow
@pytest.mark.parametrize("name", first(len(DAMAGED_FIRST), DAMAGED, pytest.mark.long))
def test_a_damaged_run_has_no_blank_view(name: str, server: WatchServer, opened: Callable[..., WatchedPage]) -> None:
    page = opened(server)
    for view in VIEWS:
        text = page.open(view, **parameters_of(view, name))
        if view == "rollout":  # there may be none: the server refuses, and the page says so in words
            page.faults[:] = [fault for fault in page.faults if "400" not in fault]
        page.require_sound(text, where=f"{name}, {view}")
    assert "Traceback" not in server.log.read_text()


def test_a_run_that_is_not_there_is_said_not_to_be(server: WatchServer, opened: Callable[..., WatchedPage]) -> None:
    page = opened(server)
    for view in VIEWS[1:]:
        text = page.open(view, **parameters_of(view, "../../etc", other="nowhere"))
        assert page.page.locator("main .problem").count(), f"{view}: {text}"
        page.faults[:] = [fault for fault in page.faults if "400" not in fault and "404" not in fault]
        page.require_sound(text, where=view)


# --- hostile text ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_hostile_text_is_shown_and_inert(server: WatchServer, opened: Callable[..., WatchedPage]) -> None:
    page = opened(server)
    runs = [HOSTILE_RUN, next(r["id"] for r in server.read("/api/runs")["runs"] if "more" in r["id"])]
    for run in runs:
        for view in VIEWS:
            text = page.open(view, **parameters_of(view, run))
            page.require_sound(text, where=f"{run}, {view}")
            assert page.page.evaluate(watch_browser.INERT) == watch_browser.NOTHING, f"{run}, {view}"
            if view in ("now", "rollouts", "rollout", "tasks"):
                assert "window.__pwned" in text, f"{view}: the text itself is to be read"
    for attack in range(len(watch_runs.HOSTILE)):
        row = 4 * attack + attack % 2  # every second one in a rollout that failed
        page.require_sound(page.open("rollout", run=HOSTILE_RUN, row=row), where=f"row {row}")
        assert page.page.evaluate(watch_browser.INERT) == watch_browser.NOTHING, f"row {row}"
    page.open("rollout", run=HOSTILE_RUN, row=1)
    content = page.page.locator("main").text_content() or ""
    assert watch_runs.HOSTILE[0] in content, "token by token, and whole"


def test_a_search_for_hostile_text_is_inert_too(server: WatchServer, opened: Callable[..., WatchedPage]) -> None:
    page = opened(server)
    for text in (watch_runs.HOSTILE[0], watch_runs.HOSTILE[1]):
        shown = page.open("rollouts", run=HOSTILE_RUN, text=text)
        for _ in range(40):
            if "isn't searched yet" not in shown:
                break
            page.page.wait_for_timeout(500)  # the index is being built
            shown = page.open("rollouts", run=HOSTILE_RUN, text=text)
        page.require_sound(shown, where=text)
        assert page.page.evaluate(watch_browser.INERT) == watch_browser.NOTHING, text
        assert "window.__pwned" in shown
    search = page.page.locator("#main input[type=search]").first
    search.fill("<b>nowhere</b>")
    search.press("Enter")
    page.page.wait_for_timeout(500)
    page.require_sound(page.settled("rollouts"))
    assert page.page.evaluate(watch_browser.INERT) == watch_browser.NOTHING


def test_a_rollout_of_a_million_tokens_opens_in_a_moment(
    server: WatchServer, opened: Callable[..., WatchedPage]
) -> None:
    page = opened(server)
    run = next(run["id"] for run in server.read("/api/runs")["runs"] if "more" in run["id"])
    row = server.read("/api/rollouts", run=run, tokens_from=watch_runs.LONG_TOKENS)["rows"][0]["row"]
    page.open("runs")
    page.require_sound(page.open("rollout", run=run, row=row))
    page.page.wait_for_function("() => document.querySelector('main').innerText.includes('All work and no play')")
    shown_s = page.page.evaluate("""() => performance.getEntriesByType('resource')
        .filter((one) => one.name.includes('/api/rollout?')).at(-1).duration / 1000""")
    assert shown_s < 5.0
    assert page.page.evaluate("() => document.querySelectorAll('*').length") < 30_000


# --- for everybody ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(
    scheme: Literal["light", "dark"], server: WatchServer, opened: Callable[..., WatchedPage]
) -> None:
    walk(opened(server, scheme), HOSTILE_RUN, axe=True, other="older-ended")
    background = opened(server, scheme).page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, background.strip("rgba()").split(",")[:3])) > 3 * 128
    assert light == (scheme == "light"), background


def test_views_are_reached_by_keys_alone(server: WatchServer, opened: Callable[..., WatchedPage]) -> None:
    page = opened(server)
    page.open("now", run=HOSTILE_RUN)
    keyboard = page.page.keyboard
    for key, view in (("d", "devices"), ("r", "run"), ("t", "tasks"), ("c", "compare"), ("o", "rollouts")):
        page.page.evaluate("() => document.querySelector('main').setAttribute('data-left', '')")
        keyboard.press("g")
        keyboard.press(key)
        page.require_sound(page.settled(view), where=f"g {key}")
    keyboard.press("/")
    assert page.page.evaluate("() => document.activeElement.type") == "search"
    keyboard.press("Escape")
    keyboard.press("j")
    keyboard.press("j")
    keyboard.press("k")
    focused = "() => document.activeElement.closest('main') && document.activeElement.closest('[data-item]').innerText"
    item = page.page.evaluate(focused)
    assert item, "an item of the list has the focus"
    keyboard.press("Enter")
    page.require_sound(page.settled("rollout"))
    keyboard.press("?")
    assert page.page.locator("dialog[open]").count() == 1
    keyboard.press("Escape")
    assert page.page.locator("dialog[open]").count() == 0
    page.open("now", run=HOSTILE_RUN)
    reached: list[str] = []
    for _ in range(15):
        keyboard.press("Tab")
        reached.append(
            page.page.evaluate("""() => {
            const style = getComputedStyle(document.activeElement);
            const visible = style.outlineStyle !== 'none' || style.boxShadow !== 'none';
            return `${document.activeElement.textContent.trim()}${visible ? '' : ' (unseen)'}`;
        }""")
        )
    assert {"Rollouts", "Devices"} <= set(reached), reached  # with a focus that is seen
    page.require_sound(page.settled("now"))


def test_the_colours_are_kept(server: WatchServer, chromium: Any) -> None:
    page = WatchedPage(chromium, server)
    page.open("runs")
    theme = "() => document.documentElement.dataset.theme"
    for _ in range(2):  # auto, light, dark
        page.page.locator("#theme").click()
    assert page.page.evaluate(theme) == "dark"
    page.page.reload()
    page.require_sound(page.settled("runs"))
    assert page.page.evaluate(theme) == "dark"
    page.close()


@pytest.mark.slow
def test_a_key_in_the_address_lets_a_browser_in(root: Path, folder: Path, chromium: Any) -> None:
    key = "a-key-of-enough-characters"
    (folder / "keys").write_text(key + "\n")
    with watch(root, cache=folder / "cache", options=["--key-file", str(folder / "keys")]) as server:
        page = WatchedPage(chromium, server)
        page.page.goto(f"{server.address}/?key={key}")
        page.require_sound(page.open("runs"))
        assert key not in page.page.url
        stranger = WatchedPage(chromium, server)
        assert stranger.page.goto(f"{server.address}/").status == 401
        page.close()
        stranger.close()


@pytest.mark.slow
def test_a_hundred_runs_are_one_page(folder: Path, opened: Callable[..., WatchedPage]) -> None:
    for number in range(100):
        source = ("ended", "killed", "interrupted", "other")[number % 4]
        watch_runs.copy_recorded(source, folder / "hundred" / f"run-{number:03d}")
    with watch(folder / "hundred", cache=folder / "cache-hundred") as server:
        page = opened(server)
        page.require_sound(page.open("runs"))
        assert page.page.locator("main tbody tr").count() == 100
        text = page.open("compare", runs=",".join(f"run-{number:03d}" for number in range(0, 100, 9)))
        page.require_sound(text)
        assert page.accessibility() == []
    assert "Traceback" not in server.log.read_text()
