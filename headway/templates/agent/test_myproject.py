"""Tests of the agent, against a server that answers as it is told, and of the tasks: `make test`."""

from __future__ import annotations

import json
import os
import random
import threading
import unittest
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import make_tasks
from myproject import STEPS, solve

from headway.api import load_experiment


class Scripted(BaseHTTPRequestHandler):
    """A model that gives the next of ``answers``, and keeps what it was asked."""

    answers: ClassVar[list[str]] = []
    asked: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append([message["content"] for message in request["messages"]])
        answer = self.answers.pop(0)
        body = json.dumps({"choices": [{"message": {"role": "assistant", "content": answer}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def play(*answers: str) -> list[list[str]]:
    """The messages of each call that the agent made."""
    Scripted.answers, Scripted.asked = list(answers), []
    server = HTTPServer(("127.0.0.1", 0), Scripted)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ.update(OPENAI_BASE_URL=f"http://127.0.0.1:{server.server_port}/v1", OPENAI_API_KEY="any")
    solve({"prompt": "19+8-3="})
    server.shutdown()
    server.server_close()
    return Scripted.asked


class Agent(unittest.TestCase):
    def test_a_step_a_call_until_a_number_is_left(self) -> None:
        assert play("27-3", "24") == [["19+8-3="], ["19+8-3=", "27-3", "="]]

    def test_it_gives_up(self) -> None:
        assert len(play("")) == 1
        assert len(play(*["27-3"] * (STEPS + 5))) == STEPS


class Tasks(unittest.TestCase):
    def test_answers_are_right(self) -> None:
        rng = random.Random(1)
        for _ in range(200):
            prompt, answer = make_tasks.make_task(rng)
            assert eval(prompt[:-1]) == int(answer)


class Configuration(unittest.TestCase):
    def test_experiment_is_valid(self) -> None:
        assert load_experiment("experiment.toml").environment.agent == "myproject:solve"


if __name__ == "__main__":
    unittest.main()
