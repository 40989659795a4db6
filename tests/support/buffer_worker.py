"""Runs that outside workers feed, and a worker that journals what was acknowledged: python buffer_worker.py URL FILE.

Each finish has a reward of its own and is repeated until it is answered, so that what the books hold can be compared
with what was acknowledged, reward by reward. Lines of FILE: ``lease UID``, ``finished UID REWARD``, ``refused STATUS``.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{{ '<|eos|>' if loop.last and message.role == 'assistant' }}{% endfor %}"
)
OUTAGE_S = 60.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def remote_sections(folder: Path, **service: Any) -> dict[str, Any]:
    """Sections for `tiny_run.write_experiment`; the model in ``folder`` gets a chat template."""
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return {
        "environment": {"name": "remote"},
        "endpoint": {"address": f"127.0.0.1:{free_port()}"},
        "buffer.service": {"lease_s": 60.0, **service},
    }


def call(url: str, body: Any, key: str = "none", limit_s: float = 60.0) -> Any:
    """The answer to a POST, or to a GET where there is no body; raises HTTPError, OSError."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, data, headers)
    with urllib.request.urlopen(request, timeout=limit_s) as response:
        return json.loads(response.read())


def ask(lease: dict[str, Any]) -> str:
    messages = [{"role": "user", "content": lease["task"]["prompt"]}]
    body = {"model": lease["model"], "messages": messages}
    answer = call(f"{lease['base_url']}/chat/completions", body, lease["api_key"])
    return answer["choices"][0]["message"]["content"]


def until_answered(url: str, body: Any) -> Any:
    """The answer to a call that is repeated while the run is away."""
    deadline = time.monotonic() + OUTAGE_S
    while True:
        try:
            return call(url, body)
        except urllib.error.HTTPError as error:
            if error.code != 503:  # the run is stopping
                raise
        except (OSError, HTTPException):
            pass
        if time.monotonic() > deadline:
            sys.exit(0)
        time.sleep(0.05)


def work(url: str, file: Path) -> None:
    def note(*words: Any) -> None:
        with file.open("a") as journal:
            journal.write(" ".join(map(str, words)) + "\n")

    chance = random.Random(os.getpid())
    while True:
        try:
            lease = until_answered(f"{url}/buffer/lease", {"wait_s": 5})
            if lease is None:
                continue
            note("lease", lease["uid"])
            ask(lease)
            reward = chance.random()
            named = {name: lease[name] for name in ("group", "member", "attempt")}
            until_answered(f"{url}/buffer/finish", {**named, "reward": reward})
            note("finished", lease["uid"], repr(reward))
        except urllib.error.HTTPError as error:
            note("refused", error.code)
        except (OSError, HTTPException):
            time.sleep(0.05)


if __name__ == "__main__":
    work(sys.argv[1], Path(sys.argv[2]))
