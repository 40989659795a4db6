"""An environment of mini-swe-agent that gives no text of a model's to a shell: it runs `echo WORDS`, nothing else."""

from __future__ import annotations

import re
import subprocess
from typing import Any

from minisweagent.environments.local import LocalEnvironment

_ECHO = re.compile(r"echo( \w{1,40}){1,8}", re.ASCII)


class HarmlessShell(LocalEnvironment):
    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        command = action.get("command", "")
        if not _ECHO.fullmatch(command):
            return {"output": "not allowed", "returncode": 126, "exception_info": ""}
        found = subprocess.run(command.split(), capture_output=True, text=True, timeout=10, check=True)
        output = {"output": found.stdout, "returncode": found.returncode, "exception_info": ""}
        self._check_finished(output)  # raises when the command says that the task is done
        return output
