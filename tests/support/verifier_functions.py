"""Verifiers that misbehave, for the tests of the real pool."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import time
from pathlib import Path

from headway.records.task import Task


def score(task: Task, response: str, folder: str = "") -> float:
    """1 for the answer; a response that names a misbehaviour does it."""
    act, _, argument = response.partition(":")
    if act == "sleep":
        time.sleep(1000)
    elif act == "regex":  # holds the interpreter lock: no Python thread of this process can run
        re.fullmatch(r"(a+)+b", "a" * 64)
    elif act == "swallow":
        while True:
            try:
                time.sleep(1000)
            except BaseException:
                continue
    elif act == "raise":
        raise RuntimeError("the checker broke")
    elif act == "refused":  # the first two times
        flag = Path(folder) / "refusals"
        times = len(flag.read_text()) if flag.exists() else 0
        if times < 2:
            flag.write_text("x" * (times + 1))
            raise ConnectionError("refused")
    elif act == "exit":
        os._exit(0)
    elif act == "nan":
        return math.nan
    elif act == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif act == "once":  # dies the first time only
        flag = Path(folder) / argument
        if not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    elif act == "announce":  # says that it runs, then waits until told to go on
        (Path(folder) / f"{argument}.{os.getpid()}").touch()
        while not (Path(folder) / "go").exists():
            time.sleep(0.01)
    elif act == "child":
        with subprocess.Popen(["sleep", "1000"]) as child:
            (Path(folder) / "child").write_text(str(child.pid))
            child.wait()
    elif act == "chatter":
        print("x" * 100_000, flush=True)
    return float(response == task.answer)
