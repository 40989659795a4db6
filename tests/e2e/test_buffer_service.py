"""Runs whose rollouts all come from outside workers, over HTTP: the clients of the examples, deaths, no workers."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from buffer_worker import call, remote_sections, until_answered

from headway.config.sources import SftSource
from headway.tasks.demonstrations import Conversation, read_demonstrations

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

CLIENTS = Path(__file__).resolve().parents[2] / "examples" / "buffer_client"
PYTHON = (sys.executable, str(CLIENTS / "client.py"))
NODE = ("node", str(CLIENTS / "client.mjs"))
STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("buffer_service")
    tiny_run.write_inputs(path)
    return path


def written(folder: Path, inputs: Path, **sections: Any) -> tuple[Path, str]:
    """(the experiment, the service's address)."""
    ledger = {"ledger": {"trackers": [], "trace": False}}  # fakes have no spans
    found = remote_sections(inputs) | ledger | tiny_run.inputs_in(inputs) | sections
    config = tiny_run.write_experiment(folder, **{"run": {"steps": STEPS}, **found})
    return config, f"http://{found['endpoint']['address']}"


@contextmanager
def workers(command: Sequence[str], url: str, count: int = 2) -> Iterator[list[subprocess.Popen[str]]]:
    processes = [
        subprocess.Popen([*command, url], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(count)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def stored(run: Path, query: str) -> list[Any]:
    with sqlite3.connect(f"file:{run / 'buffer.db'}?mode=ro", uri=True, timeout=10.0) as connection:
        return connection.execute(query).fetchall()


@pytest.mark.slow
@pytest.mark.parametrize(("command", "fault"), [(PYTHON, "thin-none"), (NODE, "none")], ids=["python", "node"])
def test_clients_of_the_examples_feed_a_run_to_its_end(
    command: Sequence[str], fault: str, folder: Path, tmp_path: Path
) -> None:
    """One of them a run of real workers, the other of fakes, which start at once."""
    config, url = written(tmp_path, folder)
    with workers(command, url):
        ended = tiny_run.train(config, fault=fault)
    assert ended.process.returncode == 0, ended.output
    tiny_run.require_whole(ended.run, STEPS)
    tiny_run.require_nothing_left(ended)
    rewards = stored(ended.run, "SELECT reward, verify_s, boundary FROM rollouts WHERE ending = 'trained'")
    assert len(rewards) == STEPS * 16
    assert {reward for reward, _, _ in rewards} <= {0.0, 1.0}
    assert {(verify_s, boundary) for _, verify_s, boundary in rewards} == {(0.0, None)}  # no verifier was asked
    (service,) = tiny_run.events_of(ended.run, "buffer_service")
    assert url in service.detail


class AwayServer(ThreadingHTTPServer):
    asked: list[tuple[str, Any]]  # path, body
    refused: list[str]  # paths


class AwayRun(BaseHTTPRequestHandler):
    """A run with one lease that dies at the first finish, is resuming at the second, and answers the third."""

    server: AwayServer

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["content-length"]))
        self.server.asked.append((self.path, json.loads(asked)))
        times = [path for path, _ in self.server.asked].count(self.path)
        if self.headers["authorization"] == "Bearer wrong":
            self.server.refused.append(self.path)
            self.answer(401, {"error": {"message": "incorrect API key provided"}})
        elif self.path == "/buffer/lease":
            named: dict[str, Any] = {"group": "0", "member": 1, "attempt": 2}
            task: dict[str, Any] = {"prompt": "1+2=", "messages": [], "answer": "3"}
            base = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
            call = {"base_url": base, "api_key": "a-key", "model": "headway"}
            self.answer(200, {**named, **call, "task": task} if times == 1 else None)
            time.sleep(0.2 * (times > 1))
        elif self.path == "/v1/chat/completions":
            self.answer(200, {"choices": [{"message": {"content": "1+2=3"}}]})
        elif times == 1:
            self.close_connection = True  # nothing is answered
        elif times == 2:
            self.answer(503, {"error": {"message": "the run is resuming", "code": "not_offered_yet"}})
        else:
            self.answer(200, {"finished": True, "repeated": True})

    def answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.parametrize("command", [PYTHON, NODE], ids=["python", "node"])
def test_clients_of_the_examples_repeat_what_is_not_answered_and_end_where_they_have_no_key(
    command: Sequence[str],
) -> None:
    with AwayServer(("127.0.0.1", 0), AwayRun) as server:
        server.asked, server.refused = [], []
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            with workers(command, url, count=1):
                deadline = time.monotonic() + 20
                while [path for path, _ in server.asked].count("/buffer/lease") < 2:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
            finishes = [body for path, body in server.asked if path == "/buffer/finish"]
            assert finishes == [{"group": "0", "member": 1, "attempt": 2, "reward": 1}] * 3
            ended = subprocess.run([*command, url, "wrong"], capture_output=True, timeout=20, check=False)
            assert ended.returncode != 0
            assert server.refused == ["/buffer/lease"]
        finally:
            server.shutdown()
            serving.join()


def test_client_of_the_example_is_short_and_needs_no_package() -> None:
    lines = (CLIENTS / "client.py").read_text().splitlines()
    assert len(lines) <= 40
    imported = {line.split()[1].partition(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert imported <= sys.stdlib_module_names


@pytest.mark.slow
def test_run_killed_behind_a_finish_keeps_it_and_offers_the_rest_again(folder: Path, tmp_path: Path) -> None:
    """The orchestrator dies once a finish is committed and before it is answered; the worker asks again."""
    config, url = written(tmp_path, folder)
    run = tmp_path / "run"
    with tiny_run.headway("train", config, "--quiet", run=run, fault="thin-parked:3") as command:
        command.until(lambda: reachable(url), "the service")
        first, second = (call(f"{url}/buffer/lease", {"wait_s": 30}) for _ in range(2))
        named = {name: first[name] for name in ("group", "member", "attempt")}
        text(first)
        text(second)
        with pytest.raises(OSError, match=r".") as died:
            call(f"{url}/buffer/finish", {**named, "reward": 0.625, "extra": {"note": "kept"}})
        assert not hasattr(died.value, "code")
        command.wait()
        assert command.process.returncode == -signal.SIGKILL
        tiny_run.wait_for_exits(command)
    with tiny_run.headway("train", config, "--quiet", "--resume", run=run, fault="thin-none") as command:
        again = until_answered(f"{url}/buffer/finish", {**named, "reward": 0.625, "extra": {"note": "kept"}})
        assert again == {"uid": first["uid"], "finished": True, "repeated": True}
        for wrong in ({"reward": 0.5}, {"reward": 0.625}):
            assert refusal(f"{url}/buffer/finish", {**named, **wrong}) == (409, "finished_otherwise")
        late = {name: second[name] for name in named} | {"reward": 1.0}
        command.until(lambda: refusal(f"{url}/buffer/finish", late)[0] != 503, "the other member's offer")
        assert refusal(f"{url}/buffer/finish", late) == (409, "lease_ended")
        with workers(PYTHON, url):
            command.wait()
    assert command.process.returncode == 0, command.output
    tiny_run.require_whole(run, STEPS)
    query = f"SELECT reward, ending FROM rollouts WHERE grp = {first['group']} AND member = {first['member']}"
    assert stored(run, query) == [(0.625, "trained")]


def text(lease: dict[str, Any]) -> str:
    messages = [{"role": "user", "content": lease["task"]["prompt"]}]
    body = {"model": lease["model"], "messages": messages}
    return call(f"{lease['base_url']}/chat/completions", body, lease["api_key"])["choices"][0]["message"]["content"]


def reachable(url: str) -> bool:
    try:
        return call(f"{url}/health", None)["status"] == "ok"
    except OSError:
        return False


def refusal(url: str, body: Any) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as refused:
        call(url, body)
    return refused.value.code, json.loads(refused.value.read())["error"]["code"]


def test_worker_that_dies_loses_its_lease_and_the_run_ends_without_it(folder: Path, tmp_path: Path) -> None:
    config, url = written(tmp_path, folder, **{"buffer.service": {"lease_s": 1.0}})
    with tiny_run.headway("train", config, "--quiet", run=tmp_path / "run", fault="thin-none") as command:
        command.until(lambda: reachable(url), "the service")
        lost = [call(f"{url}/buffer/lease", {"wait_s": 30}) for _ in range(3)]  # by a worker that is never heard again
        with workers(PYTHON, url):
            command.wait()
    assert command.process.returncode == 0, command.output
    tiny_run.require_whole(command.run, STEPS)
    assert len(tiny_run.events_of(command.run, "lease_expired")) >= len(lost)
    for lease in lost:
        where = f"grp = {lease['group']} AND member = {lease['member']}"
        assert stored(command.run, f"SELECT ending FROM rollouts WHERE {where}") == [("trained",)]


def test_finished_groups_are_shown_and_text_is_kept_for_sft(folder: Path, tmp_path: Path) -> None:
    config, url = written(tmp_path, folder, run={"steps": 1})
    with tiny_run.headway("serve-buffer", config, run=tmp_path / "run", fault="thin-none") as command:
        command.until(lambda: reachable(url), "the service")
        assert call(f"{url}/start_rollout", {})["data"] == {"status": "running"}
        assert call(f"{url}/buffer/peek", None)["success"] is False
        texts: dict[str, Any] = {}
        for _ in range(4):  # a group; the second one of four begins the step
            lease = call(f"{url}/buffer/lease", {"wait_s": 30})
            texts[f"{lease['group']}-{lease['member']}"] = [lease["task"]["prompt"], text(lease)]
            item = {"uid": lease["uid"], "instance_id": lease["group"], "messages": [], "reward": 0.5}
            assert call(f"{url}/buffer/write", {**item, "extra_info": {"by": "hand"}})["success"]
        command.until(lambda: call(f"{url}/get_rollout_data", {})["success"], "a finished group")
        data = call(f"{url}/get_rollout_data", {"batch_size": 1})["data"]
        assert data["meta_info"] == {
            "total_samples": 4, "num_groups": 1, "avg_group_size": 4.0, "avg_reward": 0.5, "finished_groups": ["0"]
        }  # fmt: skip
        assert call(f"{url}/buffer/read", {"batch_size": 8})["data"] == data  # it wasn't taken
        shown = {item["uid"]: [message["content"] for message in item["messages"]] for item in data["data"]}
        assert shown == texts
        assert data["data"][0]["extra_info"]["finish"]["extra"] == {"by": "hand"}
        said = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
        assert "sft" in call(f"{url}/buffer/write", {"messages": said, "reward": 1.0})["message"]
        stats = call(f"{url}/buffer/stats", None)["data"]
        assert (stats["current_size"], stats["total_written"], stats["total_read"]) == (4, 4, 0)
        with workers(PYTHON, url):
            command.wait()
    assert command.process.returncode == 0, command.output
    assert f"workers lease members at {url}" in command.output
    ((_, conversation),) = read_demonstrations(SftSource(path=str(command.run / "demonstrations.jsonl")))
    assert isinstance(conversation, Conversation)
    assert conversation.messages == tuple(said)


@pytest.mark.slow
def test_run_that_no_worker_feeds_is_named_as_stalled(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def named() -> list[Any]:
        return [event for event in tiny_run.events_of(tmp_path / "run", "stalled") if event.worker == "outside workers"]

    monkeypatch.setattr(tiny_run, "FAULTY", tiny_run.HERE / "stalled_headway.py")
    config, _ = written(tmp_path, folder)
    with tiny_run.headway("train", config, "--quiet", run=tmp_path / "run", fault="fakes") as command:
        command.until(named, "a stall's name")
    (stall,) = named()
    assert "for outside workers" in stall.detail
    assert "no worker leases" in stall.detail
