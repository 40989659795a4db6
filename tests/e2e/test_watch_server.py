"""The server of `headway watch` as a process: bad input is answered in words, nothing outside the runs is read, no run
is written or harmed. In a browser: test_watch_page.py.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import watch_runs
import watch_server
from watch_server import Answer, WatchServer, free_port

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

watch = partial(watch_server.watch, warm=True)
HOSTILE_RUN = "hostile"
KEY = "a-key-of-enough-characters"
SECRET = "what nobody may read"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("watch-server")


@pytest.fixture(scope="module")
def root(folder: Path) -> Path:
    """A folder of runs, whole and damaged, and beside it a secret to which some files inside point."""
    tokenizer = watch_runs.write_tokenizer(folder / "tokenizer")
    run = watch_runs.write_hostile_run(
        folder / "runs" / HOSTILE_RUN, folder / "tokenizer", tokenizer, long_tokens=watch_runs.LONG_TOKENS
    )
    watch_runs.write_damaged_runs(folder / "runs", run)
    (folder / "secret").mkdir()
    (folder / "secret" / "ledger.jsonl").write_text(SECRET)
    (run / "logs" / "elsewhere.log").symlink_to(folder / "secret" / "ledger.jsonl")
    (folder / "runs" / "linked").symlink_to(folder / "secret")
    return folder / "runs"


@pytest.fixture(scope="module")
def server(root: Path, folder: Path) -> Iterator[WatchServer]:
    with watch_server.watch(root, cache=folder / "cache") as started:
        yield started


def requests_of(run: str) -> list[tuple[str, dict[str, Any]]]:
    """A request of each kind for ``run``."""
    return [
        ("/api/runs", {}),
        ("/api/now", {"run": run}),
        ("/api/names", {"run": run}),
        ("/api/series", {"run": run, "names": "loss/loss,reward/mean,time/step_s", "axis": "hours", "points": 100}),
        ("/api/events", {"run": run}),
        ("/api/logs", {"run": run}),
        ("/api/log", {"run": run, "name": "trainer-0.log"}),
        ("/api/config", {"run": run}),
        ("/api/rollouts", {"run": run}),
        ("/api/rollouts", {"run": run, "text": "answer", "order": "-reward", "failure": 1}),
        ("/api/rollout", {"run": run, "row": 1}),
        ("/api/rollout", {"run": run, "row": 4 * len(watch_runs.HOSTILE) - 1}),
        ("/api/same_task", {"runs": f"{run},{HOSTILE_RUN}", "task": "1"}),
        ("/api/tasks", {"run": run}),
        ("/api/lanes", {"run": run}),
        ("/api/lanes/window", {"run": run, "from_s": 1.7e9, "to_s": 1.7e9 + 100, "pixels": 200}),
        ("/api/compare", {"runs": f"{run},{HOSTILE_RUN}", "names": "loss/loss", "axis": "steps"}),
    ]


def require_words(answer: Answer, what: object) -> Any:
    """The answer is JSON, and where it refuses, it says why; never a fault of the server."""
    assert answer.status < 500, f"{what}: {answer.status} {answer.body[:300]!r}"
    assert answer.headers.get_content_type() == "application/json", f"{what}: {answer.body[:100]!r}"
    found = answer.json
    if answer.status >= 400:
        assert set(found) == {"error"}, what
        assert found["error"], what
        assert "Traceback" not in found["error"], what
    return found


# --- bad input -------------------------------------------------------------------------------------------

# What must be said of the damage, by one of the answers. Those missing here have nothing to say: a file of no account.
SAID = {
    "half-a-line": "half",
    "garbage-in-ledger": "damaged",
    "deep-line": "damaged",
    "ledger-is-garbage": "damaged",
    "no-ledger": "ledger.jsonl",
    "ledger-is-a-folder": "ledger.jsonl",
    "no-config": "config.json",
    "config-is-a-list": "config.json",
    "config-is-garbage": "config.json",
    "no-rollouts": "no rollout",
    "garbage-in-segment": ".arrow",
    "segment-is-garbage": ".arrow",
    "torn-segment": ".arrow",
    "empty-segment": ".arrow",
    "garbage-in-trace": "trace",
    "no-trace": "trace",
    "older-ended": "no trace",
    "only-an-epoch": "ledger.jsonl",
}


def problems_in(found: Any) -> list[str]:
    """All sentences under "problems" or "error" in an answer, however deep."""
    if isinstance(found, list):
        return [text for one in found for text in problems_in(one)]
    if not isinstance(found, dict):
        return []
    own = [*found.get("problems", []), *([found["error"]] if "error" in found else [])]
    return own + [text for key, value in found.items() if key != "problems" for text in problems_in(value)]


@pytest.mark.slow
def test_damage_is_answered_in_words(root: Path, server: WatchServer) -> None:
    for path in sorted(root.iterdir()):
        if path.is_symlink():
            continue
        problems: list[str] = []
        for request, parameters in requests_of(path.name):
            found = require_words(server.get(request, **parameters), (path.name, request, parameters))
            if request == "/api/runs":
                found = [run for run in found["runs"] if run["id"] == path.name]
                assert found, f"{path.name} is in the list, whatever is wrong with it"
            problems += problems_in(found)
        if path.name == HOSTILE_RUN:
            assert not problems
        elif path.name in SAID:
            assert any(SAID[path.name] in text for text in problems), (path.name, problems)
    assert "Traceback" not in server.log.read_text()


ROW = {"run": HOSTILE_RUN, "row": 1}
SERIES = {"run": HOSTILE_RUN, "names": "loss/loss", "axis": "steps"}
LOG = {"run": HOSTILE_RUN, "name": "trainer-0.log"}
WINDOW = {"run": HOSTILE_RUN, "from_s": 0, "to_s": 5, "pixels": 100, "tracks": "0"}
HUGE = 10**30
STRANGE: list[tuple[str, dict[str, Any], dict[str, list[Any]]]] = [  # path, parameters, strange values of some
    ("/api/now", {}, {"run": ["", "nowhere", "\0", "a" * 10_000, "hostile/", "./hostile", "HOSTILE"]}),
    ("/api/rollout", ROW, {"row": [-1, 10**9, HUGE, "x", "1.5", "", "NaN"], "sequence": [-1, 99, "x"]}),
    ("/api/rollout", ROW, {"offset": [-5, 10**12, HUGE, "x"], "limit": [-1, 0, 10**12, "x"]}),
    ("/api/rollouts", {"run": HOSTILE_RUN}, {"limit": [0, -1, 10**9, "x"], "after": ["x", -1, HUGE, "1,2,3"]}),
    ("/api/rollouts", {"run": HOSTILE_RUN}, {"text": ["\0", "x" * 20_000, "(", "\u202e", "%", "\\"], "order": ["x"]}),
    ("/api/rollouts", {"run": HOSTILE_RUN}, {"reward_from": ["inf", "x"], "reward_to": ["nan"], "solved": ["maybe"]}),
    ("/api/rollouts", {"run": HOSTILE_RUN}, {"tokens_from": ["1e99", -1], "version_from": ["x"], "step_from": [HUGE]}),
    ("/api/rollouts", {"run": HOSTILE_RUN}, {"ending": ["nonsense"], "task": ["[" * 1000], "group": [-1, "x", HUGE]}),
    ("/api/series", SERIES, {"points": [0, -1, 10**9, "x"], "axis": ["furlongs", ""], "since": [10**12, -1, "x"]}),
    ("/api/series", SERIES, {"names": ["nothing", "", "loss/loss," * 3000, "__proto__", "\0"]}),
    ("/api/log", LOG, {"bytes": [0, -1, 10**12, "x"], "end": [-1, 10**12, HUGE, "x"], "unix_s": ["nan", "x", -1]}),
    ("/api/lanes/window", WINDOW, {"from_s": [10, "nan", "-inf", "x"], "to_s": ["inf", 1e308, -1]}),
    ("/api/lanes/window", WINDOW, {"pixels": [0, -1, 10**9, "x"], "tracks": ["x", "-1,99999", "", "0," * 5000]}),
    ("/api/events", {"run": HOSTILE_RUN}, {"after": ["x", -1, HUGE]}),
    ("/api/tasks", {"run": HOSTILE_RUN}, {"bins": [0, -1, 10**9, "x"]}),
    ("/api/compare", {"runs": HOSTILE_RUN}, {"runs": ["", ",", "nowhere,hostile", ",".join([HOSTILE_RUN] * 500)]}),
    ("/api/compare", {"runs": HOSTILE_RUN}, {"axis": ["furlongs"], "points": [0, -1, 10**9, "x"]}),
    ("/api/same_task", {"runs": HOSTILE_RUN}, {"task": ["", "\0"], "runs": ["nowhere", ""]}),
    ("/api/stream", {}, {"run": ["nowhere", "../secret"]}),
    ("/api/nothing", {}, {"run": ["x"]}),
    *[(path, {}, {"a": [1]}) for path in ("/api/now", "/api/rollout", "/api/log", "/api/lanes/window", "/api/series")],
]


def test_strange_parameters_are_answered_in_words(server: WatchServer) -> None:
    cases = [
        (path, {**base, name: value}) for path, base, strange in STRANGE for name in strange for value in strange[name]
    ]
    for path, parameters in cases:
        started_s = time.monotonic()
        require_words(server.get(path, **parameters), (path, str(parameters)[:200]))
        assert time.monotonic() - started_s < 10.0, (path, str(parameters)[:200])
    assert "Traceback" not in server.log.read_text()


def test_only_get_is_answered(server: WatchServer) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10.0)
        with contextlib.closing(connection):
            connection.request(method, "/api/runs", body=b"{}")
            assert connection.getresponse().status == 405


def test_the_long_rollout_comes_in_windows(server: WatchServer) -> None:
    row = server.read("/api/rollouts", run=HOSTILE_RUN, tokens_from=watch_runs.LONG_TOKENS)["rows"][0]
    assert row["tokens"] == watch_runs.LONG_TOKENS
    answer = server.get("/api/rollout", run=HOSTILE_RUN, row=row["row"])
    assert len(answer.body) < 2_000_000
    (whole,) = answer.json["sequences"]
    assert whole["total_tokens"] >= watch_runs.LONG_TOKENS
    assert len(whole["tokens"]) <= 8000
    window = server.read("/api/rollout", run=HOSTILE_RUN, row=row["row"], sequence=0, offset=900_000, limit=100)
    part = window["sequences"][0]
    assert part["offset"] == 900_000
    sentence = "All work and no play makes a very long rollout. " + watch_runs.HOSTILE[0] + "\n"
    at = (900_000 - len("Go on:")) % len(sentence)
    assert "".join(part["tokens"]) == (sentence * 3)[at : at + 100]


# --- who may read, and what ------------------------------------------------------------------------------


def test_nothing_outside_the_runs_is_read(root: Path, folder: Path, server: WatchServer) -> None:
    inside = HOSTILE_RUN
    outside = [
        "../secret",
        "hostile/../../secret",
        str(folder / "secret"),
        "..",
        ".",
        "/etc",
        "linked",
        "%2e%2e/secret",
    ]
    for run in outside:
        for path, parameters in requests_of(run)[1:]:
            answer = server.get(path, **parameters)
            require_words(answer, (path, run))
            assert SECRET.encode() not in answer.body, (path, run)
            assert answer.status in (400, 404) or path in ("/api/compare", "/api/same_task"), (path, run)
    names = [
        "../ledger.jsonl",
        "../../../secret/ledger.jsonl",
        "elsewhere.log",
        "/etc/passwd",
        "..",
        "",
        "\0",
        "a/b.log",
    ]
    for name in names:
        answer = server.get("/api/log", run=inside, name=name)
        assert require_words(answer, name).keys() == {"error"}, name
    assert "elsewhere.log" not in json.dumps(server.read("/api/logs", run=inside))
    paths = ("/../cli/watch.py", "/..%2f..%2fpyproject.toml", "//etc/passwd", "/%2e%2e/app.py", "/static/../app.py",
             "/views/..%2f..%2fapp.py", "/vendor/../../access.py", "/%00", "/views/")  # fmt: skip
    for path in paths:
        answer = server.get(path)
        assert answer.status in (400, 404), (path, answer.status, answer.body[:200])


def test_headers_let_nothing_in_and_nothing_out(server: WatchServer) -> None:
    for path in ("/", "/app.js", "/api/runs", "/api/nothing"):
        headers = server.get(path).headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy or "default-src 'self'" in policy, path
        assert "unsafe" not in policy, path
        assert "frame-ancestors 'none'" in policy, path
        assert headers["X-Content-Type-Options"] == "nosniff", path
        assert headers["Referrer-Policy"] == "no-referrer", path
        assert headers["Access-Control-Allow-Origin"] is None, path
    # Another site's page that had its name resolved to this machine is no user of this server.
    assert server.get("/api/runs", headers={"Host": "attacker.example"}).status in (400, 403, 421)


def test_other_machines_need_a_key(root: Path, folder: Path) -> None:
    refused = tiny_run.refused("watch", root, "--host", "0.0.0.0", "--port", str(free_port()), "--no-open")
    assert "--key-file" in refused
    keys = folder / "keys"
    keys.write_text(KEY + "\n")
    with watch(root, cache=folder / "cache", options=["--host", "0.0.0.0", "--key-file", str(keys)]) as server:
        for path in ("/api/runs", f"/api/now?run={HOSTILE_RUN}", f"/api/stream?run={HOSTILE_RUN}"):
            assert server.get(path).status == 401, path
            for wrong in ("Bearer " + KEY[:-1], "Bearer", "Basic " + KEY, "Bearer " + KEY + "x"):
                assert server.get(path, headers={"Authorization": wrong}).status == 401, wrong
        assert server.get("/api/runs", headers={"Authorization": f"Bearer {KEY}"}).status == 200
        assert KEY not in server.log.read_text()


def test_rollouts_are_shown_without_pandas(server: WatchServer) -> None:
    """It would take 50 MB, and the first page as long as everything else."""
    assert importlib.util.find_spec("pandas"), "else this shows nothing"
    assert server.read("/api/rollouts", run=HOSTILE_RUN)["rows"]
    assert "/pyarrow/" in (mapped := Path(f"/proc/{server.process.pid}/maps").read_text())
    assert "/pandas/" not in mapped


# --- the run comes to no harm ----------------------------------------------------------------------------


def listing(folder: Path) -> dict[str, tuple[int, ...]]:
    """Every path below ``folder`` with what would show that somebody wrote there."""
    found: dict[str, tuple[int, ...]] = {}
    for parent, folders, files in os.walk(folder):
        for name in (".", *folders, *files):
            status = os.lstat(os.path.join(parent, name))
            found[os.path.join(parent, name)] = (status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns,
                                                 status.st_ctime_ns)  # fmt: skip
    return found


def read_everything(server: WatchServer, *runs: str) -> None:
    for run in runs:
        for request, parameters in requests_of(run):
            server.get(request, **parameters)


def require_same(answers: list[Any], first: list[Any]) -> None:
    """Raise AssertionError with the keys that differ, and no more of the answers."""
    pairs = [
        (n, key, one[key], other.get(key))
        for n, (one, other) in enumerate(zip(answers, first, strict=True))
        for key in one
    ]
    assert [pair for pair in pairs if pair[2] != pair[3]] == []


def derived_answers(server: WatchServer) -> list[Any]:
    """What is said of the hostile run's rollouts, tasks and trace, once its text index is complete."""
    deadline = time.monotonic() + 60.0
    while server.read("/api/rollouts", run=HOSTILE_RUN, text="x")["indexed_share"] < 1.0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return [require_words(server.get(path, **parameters), path) for path, parameters in requests_of(HOSTILE_RUN)[8:15]]


READ = (HOSTILE_RUN, "garbage-in-segment", "torn-segment", "half-a-trace", "older-ended", "no-config")


@pytest.mark.slow
def test_no_run_is_written_and_the_cache_may_go(root: Path, folder: Path) -> None:
    before = listing(root)
    cache = folder / "own-cache"
    with watch(root, cache=cache) as server:
        read_everything(server, *READ)
        first = derived_answers(server)
        assert first[1]["rows"], f"what is searched for is there: {first[1]}, {first[0] | {'rows': 0}}"
        kept = cache / "headway" / "watch"
        assert any(path.is_file() for path in kept.rglob("*")), "it keeps what it derived"
        shutil.rmtree(kept)
        require_same(derived_answers(server), first)
        read_everything(server, *READ)
        server.kill()
    for path in [path for path in kept.rglob("*") if path.is_file()]:
        path.write_bytes(b"\xff" * path.stat().st_size)  # a cache of garbage is built anew
    with watch(root, cache=cache) as server:
        require_same(derived_answers(server), first)
        assert "Traceback" not in server.log.read_text()
    assert listing(root) == before


def test_two_watchers_with_one_cache_agree(root: Path, folder: Path) -> None:
    with watch(root, cache=folder / "shared") as one, watch(root, cache=folder / "shared") as other:
        answers: dict[int, list[Any]] = {}

        def ask(server: WatchServer) -> None:
            answers[server.port] = derived_answers(server)

        threads = [threading.Thread(target=ask, args=(server,)) for server in (one, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        assert answers[one.port] == answers[other.port]
        for server in (one, other):
            assert "Traceback" not in server.log.read_text()


@pytest.mark.slow
def test_a_run_outlives_its_watchers(folder: Path) -> None:
    live = folder / "live"
    live.mkdir()
    tiny_run.write_inputs(live)
    run = live / "run"
    config = tiny_run.write_experiment(live, run={"directory": str(run), "steps": 40}, checkpoint={"every_steps": 10})
    with tiny_run.headway("train", config, "--quiet", run=run) as command:
        with watch(live, cache=folder / "cache-of-live") as server:
            command.until(lambda: len(tiny_run.steps_of(run)) >= 2, "two steps")
            read_everything(server, "run")
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30.0)
            with contextlib.closing(connection):
                connection.request("GET", "/api/stream?run=run")
                stream = connection.getresponse()
                assert stream.readline() == b"event: now\n"
                server.kill()  # in the middle of it
                shutil.rmtree(folder / "cache-of-live" / "headway")
        assert command.wait() == 0, command.output
    tiny_run.require_whole(run, 40, drained=False)
