"""Workers and peers of the links' benchmark."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable
from typing import Any

from headway.runtime.child import WorkerContext

BLOCK = 1 << 20  # bytes of one recv of the bare loop


class Echo:
    """Returns what it is sent, or how much that was."""

    def __init__(self, context: WorkerContext) -> None:
        del context

    def echo(self, value: Any) -> Any:
        return value

    def pin(self, cores: Iterable[int]) -> None:
        pin_process(cores)

    def count(self, arrays: Any) -> int:
        return len(arrays)


def pin_process(cores: Iterable[int]) -> None:
    """Run all threads of this process on ``cores`` alone."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


def bare_receiver(port: int, size_bytes: int) -> None:
    """Receive messages of ``size_bytes`` into memory that is there, acknowledging each by a byte."""
    target = memoryview(bytearray(size_bytes))
    with socket.create_connection(("127.0.0.1", port)) as sock:
        while True:
            at = 0
            while at < size_bytes:
                count = sock.recv_into(target[at : at + BLOCK])
                if not count:
                    return
                at += count
            sock.sendall(b"x")


if __name__ == "__main__":
    bare_receiver(int(sys.argv[1]), int(sys.argv[2]))
