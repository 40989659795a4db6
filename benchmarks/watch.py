"""Is the page to watch fast, and does it leave the run alone? `headway watch` on a synthetic run, in a real Chromium.

    python benchmarks/watch.py [--directory DIR] [--rollouts 500000] [--events 10000000] [--only PART ...] [--quick]

The run (`watch_run.py`: 500,000 rollouts, 2 GB and more, written by the writer of a live one) and the trace
(`watch_trace.py`: 10 million events) are kept in DIR (default: runs/benchmark-watch) and made once. Each round of
`open_s` has a server and a browser of its own, whose caches are empty, and a run whose files the kernel has dropped;
it takes from the navigation to the frame after the first useful paint: of *Now* the sentence and the queue, of
*Rollouts* the first rows with their text. `search_s` is the first page of the worst of four searches, asked when the
text index is complete: a common word, one in three rollouts, one in none, a piece of code. `zoom_frames_per_s`: the
lanes are zoomed by the wheel from the whole trace to a decode step and back, an event a frame.

`file_open_s` is the run's page as one file (`headway report --html`) from file://, `file_mb` its size, `file_write_s`
the time to write it, `file_serious` what axe finds on its views, `file_problems` the sentences there about what isn't
in it.

Last line, one JSON object: `recording_cost` (`recording.py`), `open_s` (the worse view's median) and `open_now_s`,
`open_rollouts_s`; `rss_mb` (the most a server had resident), `cost_of_20_viewers` (`watch_viewers.py`), `search_s`
with `searches` by kind, `index_mb_per_s` (of the record, until the index is complete), `zoom_frames_per_s` and
`zoom_slowest_ms` (95th percentile of a frame); null where Chromium or playwright isn't installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import recording
import watch_run
import watch_trace
import watch_viewers
from parts.watch_processes import WatchServer, browser, lacking, open_page, watch

from headway.services.watch.page_file import write_run_page

TARGETS = {
    "recording_cost": "<= 0.02",
    "open_s": "<= 2",
    "rss_mb": "<= 300",
    "cost_of_20_viewers": "<= 0.05",
    "search_s": "<= 1",
    "index_mb_per_s": ">= 50",
    "zoom_frames_per_s": ">= 30",
    "file_open_s": "<= 3",
    "file_mb": "<= 15",
    "file_serious": "0",
}
USEFUL = {  # what a view shows first that says something
    "now": "main.view-now .sentence p",
    "rollouts": "main.view-rollouts .hits a.hit",
}
OPENED = ("open_s", *(f"open_{view}_s" for view in USEFUL))
ZOOMED = ("zoom_frames_per_s", "zoom_slowest_ms", "lanes_open_s")
FILED = ("file_open_s", "file_mb", "file_write_s", "file_serious", "file_problems")
PARTS = ("recording", "viewers", "open", "search", "zoom", "file")
INDEX_LIMIT_S = 1800.0
PAINTED = """
const look = () => {
  if (!document.querySelector(%s)) return requestAnimationFrame(look);
  requestAnimationFrame(() => setTimeout(() => { window.__painted_s = performance.now() / 1000; }));
};
requestAnimationFrame(look);
"""
ZOOM = """async (seconds) => {
  const canvas = document.querySelector("main canvas");
  const { left, top, width, height } = canvas.getBoundingClientRect();
  const place = { clientX: left + 0.6 * width, clientY: top + height / 2, bubbles: true, cancelable: true };
  const frames = [];
  const began = performance.now();
  let last = began;
  while (last - began < seconds * 1000) {
    const inwards = (last - began) / 1000 < seconds / 2;
    canvas.dispatchEvent(new WheelEvent("wheel", { ...place, deltaY: inwards ? -60 : 60, ctrlKey: true }));
    const now = await new Promise((resolve) => requestAnimationFrame(resolve));
    frames.push(now - last);
    last = now;
  }
  return frames;
}"""


@contextmanager
def served(run: Path, memory_mb: list[float]) -> Iterator[WatchServer]:
    """A server of ``run`` with an empty cache; the most memory it had is added to ``memory_mb``."""
    cache = Path(tempfile.mkdtemp(prefix="headway-watch-"))
    try:
        with watch(run, cache=cache) as server:
            yield server
            memory_mb.append(server.memory_mb())
            print(f"server: {memory_mb[-1]:.0f} MB at most, CPU {server.cpu_s():.1f} s", flush=True)
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def run_id(server: WatchServer) -> str:
    return server.read("/api/runs")["runs"][0]["id"]


def drop_from_memory(folder: Path) -> None:
    """Have the kernel forget the files below ``folder``."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_opening(run: Path, rounds: int, memory_mb: list[float]) -> dict[str, float]:
    """Seconds from navigation to the first useful paint of each view, medians over ``rounds``."""
    taken: dict[str, list[float]] = {view: [] for view in USEFUL}
    for _ in range(rounds):
        for view, selector in USEFUL.items():
            drop_from_memory(run)
            with served(run, memory_mb) as server, browser() as chromium:
                page = chromium.new_page()
                page.add_init_script(PAINTED % json.dumps(selector))
                page.goto(server.page(view, run=run.resolve().name))  # nothing is asked before
                page.wait_for_function("() => window.__painted_s", timeout=120_000)
                taken[view].append(page.evaluate("() => window.__painted_s"))
    print("; ".join(f"{view}: " + ", ".join(f"{s:.2f}" for s in taken[view]) + " s" for view in taken), flush=True)
    medians = [round(statistics.median(seconds), 3) for seconds in taken.values()]
    return dict(zip(OPENED, [max(medians), *medians], strict=True))


def measure_searching(run: Path, rounds: int, memory_mb: list[float]) -> dict[str, Any]:
    """The speed of the text index's building, and seconds of each kind of search with the index complete."""
    record_mb = sum(path.stat().st_size for path in (run / "rollouts" / "finished").iterdir()) / 1e6
    with served(run, memory_mb) as server:
        name, began_s = run_id(server), time.monotonic()
        while (share := server.read("/api/rollouts", run=name, text="x", limit=1)["indexed_share"]) < 1.0:
            if time.monotonic() - began_s > INDEX_LIMIT_S:
                raise SystemExit(f"the index isn't complete after {INDEX_LIMIT_S:.0f} s: {share:.1%}")
            time.sleep(0.25)
        built_s = time.monotonic() - began_s
        print(f"index of {record_mb:,.0f} MB: {built_s:.1f} s, server CPU {server.cpu_s():.1f} s", flush=True)
        searches = dict[str, float]()
        for kind, text in watch_run.SEARCHES.items():
            taken = list[float]()
            for _ in range(rounds):
                began_s = time.monotonic()
                found = server.read("/api/rollouts", run=name, text=text, limit=50)
                taken.append(time.monotonic() - began_s)
            searches[kind] = round(max(taken), 3)
            print(f"search, {kind}: {len(found['rows'])} rows, at most {max(taken):.3f} s", flush=True)
    return {
        "search_s": max(searches.values()),
        "searches": searches,
        "index_mb_per_s": round(record_mb / built_s, 1),
        "record_mb": round(record_mb),
    }


def measure_zoom(run: Path, seconds: float, memory_mb: list[float]) -> dict[str, float]:
    """Frames a second while the lanes of a long trace are zoomed."""
    with served(run, memory_mb) as server, browser() as chromium:
        page = chromium.new_page(viewport={"width": 1600, "height": 900})
        began_s = time.monotonic()
        page.goto(server.page("devices", run=run_id(server)))
        page.locator("main.view-devices canvas").first.wait_for(timeout=600_000)
        opened_s = time.monotonic() - began_s
        page.evaluate(ZOOM, 1.0)
        frames_ms = page.evaluate(ZOOM, seconds)
    print(
        f"zoom: {len(frames_ms)} frames, slowest {max(frames_ms):.0f} ms, lanes there after {opened_s:.1f} s",
        flush=True,
    )
    rate, slowest_ms = 1000 * len(frames_ms) / sum(frames_ms), statistics.quantiles(frames_ms, n=20)[-1]
    return dict(zip(ZOOMED, [round(rate, 1), round(slowest_ms, 1), round(opened_s, 2)], strict=True))


def measure_file(run: Path, rounds: int) -> dict[str, Any]:
    """The run's page as one file: seconds from navigation to the verdict's paint, its size, seconds to write it,
    serious findings of axe over its views, and its sentences about what isn't inside."""
    with tempfile.TemporaryDirectory(prefix="headway-watch-") as folder:
        began_s = time.monotonic()
        path = write_run_page(run, Path(folder) / "page.html")
        written_s, opened_s = time.monotonic() - began_s, list[float]()
        for _ in range(rounds):
            with browser() as chromium:
                page = chromium.new_page()
                page.add_init_script(PAINTED % json.dumps("main.view-report h1"))
                page.goto(path.as_uri())
                page.wait_for_function("() => window.__painted_s", timeout=120_000)
                opened_s.append(page.evaluate("() => window.__painted_s"))
        serious, problems = list[str](), list[str]()
        with browser() as chromium:
            page = open_page(chromium, path)
            for view in ("report", "now", "run", "rollouts", "tasks", "devices"):
                page.require_sound(page.open(view, run=run.resolve().name))
                serious += page.accessibility()
                problems += page.page.locator("main .problem").all_inner_texts()
        print(f"file: {', '.join(f'{s:.2f}' for s in opened_s)} s", *serious, *problems, sep="\n", flush=True)
        figures = statistics.median(opened_s), path.stat().st_size / 1e6, written_s
    return dict(zip(FILED, [*(round(figure, 2) for figure in figures), len(serious), len(problems)], strict=True))


def measure_recording(quick: bool) -> float:
    """The record's share of the orchestrator's and the trainer's CPU, the larger."""
    trainer = recording.measure_trainer(1 if quick else 10, 64)
    orchestrator = recording.measure_orchestrator(1 if quick else 3, 512 if quick else 4096)
    return max(trainer["trainer"], orchestrator["orchestrator"])


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path("runs/benchmark-watch"))
    parser.add_argument("--rollouts", type=int, default=500_000)
    parser.add_argument("--events", type=int, default=10_000_000, help="of the trace")
    parser.add_argument("--seconds", type=float, default=60.0, help="that twenty viewers watch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts alone")
    parser.add_argument("--quick", action="store_true", help="little of everything: does it work?")
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.rollouts, chosen.events, chosen.seconds, chosen.rounds = 2000, 20_000, 5.0, 1
    parts, memory_mb, found = chosen.only or PARTS, list[float](), dict[str, Any]()
    if reason := lacking():
        print(f"no browser: {reason}", flush=True)
    if "recording" in parts:
        found["recording_cost"] = measure_recording(chosen.quick)
    if "viewers" in parts:
        found |= watch_viewers.measure(chosen.seconds)
        memory_mb.append(found["live_rss_mb"])
    if {"open", "search", "file"} & set(parts):
        run = watch_run.write_once(chosen.directory / f"run-{chosen.rollouts}", chosen.rollouts)
        if "open" in parts:
            found |= dict.fromkeys(OPENED) if reason else measure_opening(run, chosen.rounds, memory_mb)
        if "search" in parts:
            found |= measure_searching(run, chosen.rounds, memory_mb)
        if "file" in parts:
            found |= dict.fromkeys(FILED) if reason else measure_file(run, chosen.rounds)
    if "zoom" in parts:
        traced = watch_trace.write_once(chosen.directory / f"trace-{chosen.events}", chosen.events)
        seconds = 1.0 if chosen.quick else 8.0
        found |= dict.fromkeys(ZOOMED) if reason else measure_zoom(traced, seconds, memory_mb)
    found["rss_mb"] = round(max(memory_mb, default=0.0))
    for name, target in [(name, target) for name, target in TARGETS.items() if name in found]:
        print(f"{name}: {found[name]} (target: {target})")
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
