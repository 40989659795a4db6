"""A mirror in a process of its own, which may be in another network namespace and be killed; see `MirrorProcess`."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
from typing import Any, cast

from mirrored_weights import Context

from headway.weights.mirror import MirrorService


class MirrorProcess:
    """A `MirrorService` behind pipes: ``begin`` a call, ``end`` it, or ``kill`` the process between the two."""

    def __init__(self, namespace: str, **settings: Any) -> None:
        """``settings``: the arguments of `MirrorService`."""
        self._command = ["ip", "netns", "exec", namespace, sys.executable, __file__]
        self._settings = settings
        self.address = ""
        self.start()

    def start(self) -> None:
        """Start the process, or another one after it was killed."""
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.begin(**self._settings)
        self.address = self.end()

    def begin(self, *words: Any, **arguments: Any) -> None:
        """Send a call: the method's name, and its arguments."""
        assert self._process.stdin is not None
        pickle.dump((words, arguments), self._process.stdin)
        self._process.stdin.flush()

    def end(self) -> Any:
        """Wait for the result. Raises the call's exception."""
        assert self._process.stdout is not None
        result = pickle.load(self._process.stdout)
        if isinstance(result, BaseException):
            raise result
        return result

    def call(self, *words: Any) -> Any:
        """Call a method, given its name and arguments."""
        self.begin(*words)
        return self.end()

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._reap()

    def close(self) -> None:
        """End the process, which removes the mirror's files."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._reap()

    def _reap(self) -> None:
        self._process.wait(30)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def main() -> None:
    """Serve calls until the standard input ends."""
    calls, results = sys.stdin.buffer, sys.stdout.buffer
    _, settings = pickle.load(calls)
    service = MirrorService(cast(Any, Context()), **settings)
    result: Any = service.address()
    with contextlib.closing(service), contextlib.suppress(EOFError):
        while True:
            pickle.dump(result, results)
            results.flush()
            (method, *arguments), _ = pickle.load(calls)
            try:
                result = getattr(service, method)(*arguments)
            except Exception as error:
                result = error


if __name__ == "__main__":
    main()
