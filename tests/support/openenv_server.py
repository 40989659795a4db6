"""A server of the package openenv-core: a number is guessed."""

from __future__ import annotations

import os
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int


class Seen(Observation):
    text: str


class Number(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, highest: int = 10, **_: Any) -> Seen:
        self.number, self.steps = (seed or 0) % highest, 0
        return Seen(text=f"A number below {highest}.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Seen:
        self.steps += 1
        if action.number == 666:
            os._exit(1)
        if action.number == 13:
            raise ZeroDivisionError("unlucky")
        if action.number == self.number:
            return Seen(text="Right.", reward=1.0, done=True)
        return Seen(text="Higher." if action.number < self.number else "Lower.", reward=-0.1)

    @property
    def state(self) -> State:
        return State(step_count=self.steps)


if __name__ == "__main__":
    app = create_fastapi_app(Number, Guess, Seen, max_concurrent_envs=16)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
