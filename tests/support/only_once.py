"""An environment whose workers can be started at the run's beginning alone."""

from __future__ import annotations

import os
from pathlib import Path

from headway.rollout.environment import Answer, Environment, Episode


class OnlyOnce(Environment):
    """Its worker dies at the first answer, and no other can be started."""

    def __init__(self, mark: str) -> None:
        self.mark = Path(mark)
        if self.mark.exists():
            raise RuntimeError("there was one already")

    async def reply(self, episode: Episode, answer: Answer) -> None:
        self.mark.touch()
        os._exit(3)
