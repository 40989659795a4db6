"""A server that answers log-probabilities of given ids in the formats of vLLM, SGLang and `headway serve`, with faults.

Its model is a table: the log-probabilities of the next token after each token.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

VOCABULARY = 300


def table(seed: int) -> np.ndarray:
    logits = np.random.default_rng(seed).standard_normal((VOCABULARY, VOCABULARY)) * 2
    return (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)


@dataclass
class TeacherServer:
    owner: str = "headway"
    model: str = "teacher"
    logprobs: np.ndarray = field(default_factory=lambda: table(0))
    fault: str = ""  # of every answer, from now on
    faults: int = 10**9  # answers with it that are left
    requests: int = 0
    url: str = ""

    def entries(self, ids: list[int], top: int) -> list[Any]:
        """(log-probability, [(id, log-probability), ...]) of each token; None for the first."""
        entries: list[Any] = [None]
        for before, token in itertools.pairwise(ids):
            row = self.logprobs[before]
            order = np.argsort(-row)[:top].tolist()
            entries.append((float(row[token]), [(i, float(row[i])) for i in order]))
        return entries

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        ids = body.get("prompt") or body["input_ids"]
        top = next(body[key] for key in ("prompt_logprobs", "top_logprobs_num", "logprobs") if key in body)
        entries = self.entries(ids, top)
        fault, answered = "", list(ids)
        if self.fault and self.faults > 0 and len(ids) > 2:
            fault, self.faults = self.fault, self.faults - 1
        if fault == "hang":
            time.sleep(3)
        if fault == "fewer tokens":
            entries, answered = entries[:-1], answered[:-1]
        if fault == "fewer others":
            entries = [None if entry is None else (entry[0], entry[1][:-1]) for entry in entries]
        if fault == "another order":
            answered[1:3] = answered[2:0:-1]
        if fault == "huge id":
            entries[-1] = (entries[-1][0], [(10**12 + i, p) for i, p in entries[-1][1]])
        if fault == "NaN":
            entries[-1] = (float("nan"), entries[-1][1])
        return self.formatted(path, answered, entries, top)

    def formatted(self, path: str, ids: list[int], entries: list[Any], top: int) -> Any:
        chosen = [None if entry is None else entry[0] for entry in entries]
        if path == "/generate":
            rows = [[logprob, token, None] for logprob, token in zip(chosen, ids, strict=True)]
            likeliest = [None if e is None else [[p, i, None] for i, p in e[1]] for e in entries]
            return {"text": "", "meta_info": {"input_token_logprobs": rows, "input_top_logprobs": likeliest}}
        if self.owner == "vllm":
            dicts = [self._ranked(token, entry) for token, entry in zip(ids, entries, strict=True)]
            return {"choices": [{"text": "", "prompt_logprobs": dicts}]}
        scored = {"token_ids": ids, "token_logprobs": chosen}
        scored["top_ids"] = [None if e is None else [i for i, _ in e[1]] for e in entries] if top else None
        scored["top_id_logprobs"] = [None if e is None else [p for _, p in e[1]] for e in entries] if top else None
        return {"choices": [{"text": "", "logprobs": scored}]}

    def _ranked(self, token: int, entry: Any) -> Any:
        """vLLM's: the likeliest tokens by rank, and the token itself with its own."""
        if entry is None:
            return None
        ranked = {str(i): {"logprob": p, "rank": rank, "decoded_token": ""} for rank, (i, p) in enumerate(entry[1], 1)}
        return {str(token): {"logprob": entry[0], "rank": 250, "decoded_token": ""}} | ranked


@contextmanager
def teacher_server(**settings: Any) -> Iterator[TeacherServer]:
    state = TeacherServer(**settings)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def reply(self, status: int, answer: Any) -> None:
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            self.reply(200, {"data": [{"id": state.model, "owned_by": state.owner}]})

        def do_POST(self) -> None:
            state.requests += 1
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if state.fault == "dies" and state.faults > 0:
                state.faults -= 1
                self.close_connection = True
                return
            if state.fault == "overloaded" and state.faults > 0:
                state.faults -= 1
                self.reply(503, {"error": "later"})
                return
            if body.get("model", state.model) != state.model:
                self.reply(404, {"error": f"{body['model']} isn't served"})
                return
            self.reply(200, state.answer(self.path, body))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
