"""Ranks of a gloo process group that stay between tests, since a start costs each the import of torch."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed

LIMIT_S = 100.0


class RankPool:
    """``size`` processes, each of which is a rank; they are forked from a process that has imported torch."""

    def __init__(self, size: int) -> None:
        self._file = os.path.join(tempfile.mkdtemp(), "rendezvous")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "divided_models"])
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._file, rank, size), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(*args)`` on every rank; their results. Raises RuntimeError with a rank's traceback; after that the
        ranks aren't usable any more, since some may be in a collective."""
        for pipe in self._pipes:
            pipe.send((function, args))
        replies = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(LIMIT_S):
                raise RuntimeError(f"rank {rank} has not answered in {LIMIT_S} s")
            error, reply = pipe.recv()
            if error:
                raise RuntimeError(f"rank {rank}: {error}")
            replies.append(reply)
        return replies

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(pipe: Connection, file: str, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT_S)
    )
    while True:
        function, args = pipe.recv()
        try:
            reply = "", function(*args)
        except Exception:
            reply = traceback.format_exc(), None
        pipe.send(reply)
