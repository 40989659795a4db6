"""Trial compilation of grammars in a separate process, since the library bounds neither its recursion nor its memory.

Run as a program, this module is that process: it reads grammars on standard input, each after its length, and answers
each with one byte.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import signal
import subprocess
import sys
import threading

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

TRIAL_S = 10.0  # CPU seconds that a grammar may take
_COMMAND = ("-m", "headway.tokens.trial_compilation")
_TRIAL_BYTES = 1 << 30  # limit of the process's address space, which includes what the process takes by itself


class GrammarTrial:
    """The trial process, started when it is first needed and after each grammar that killed it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def compiles_safely(self, text: str) -> bool:
        """Whether the library compiles this grammar, or refuses it, within TRIAL_S and without crashing."""
        with self._lock:
            grammar_bytes = text.encode("utf-8", "surrogatepass")
            for _ in range(2):
                process = self._running_process()
                assert process.stdin is not None
                assert process.stdout is not None
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(len(grammar_bytes).to_bytes(8, "little") + grammar_bytes)
                    process.stdin.flush()
                    if process.stdout.read(1):
                        return True
                if process.wait() not in (-signal.SIGKILL, -signal.SIGTERM):  # another process killed it: try again
                    return False
            return False

    def _running_process(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, *_COMMAND]
            devnull = subprocess.DEVNULL
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=devnull)
        return self._process


@functools.cache
def grammar_trial() -> GrammarTrial:
    """Return this process's GrammarTrial."""
    return GrammarTrial()


def main() -> None:
    """Compile grammars until standard input ends. A grammar that takes too much CPU time ends the process: SIGPROF does
    so in the library's code, too."""
    resource.setrlimit(resource.RLIMIT_AS, (_TRIAL_BYTES, _TRIAL_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(10)
    tokenizer, limits = LLTokenizer("byte"), LLParserLimits(max_grammar_size=100_000, verbose_errors=False)
    while size_bytes := sys.stdin.buffer.read(8):
        text = sys.stdin.buffer.read(int.from_bytes(size_bytes, "little")).decode("utf-8", "replace")
        signal.setitimer(signal.ITIMER_PROF, TRIAL_S)  # by the clock, a busy machine would refuse any grammar
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if not matcher.get_error():
            matcher.compute_bitmask()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(b".")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
