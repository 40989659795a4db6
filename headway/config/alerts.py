"""`[alerts]`"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headway.config.section import Section, named_once

AlertRule = Literal["stall", "no_step", "skipped", "kl", "entropy", "reward_hacking", "length", "disk"]


class AlertsConfig(Section):
    """What a run raises an alarm about, and whom it tells: docs/alerts.md."""

    rules: Annotated[tuple[AlertRule | Literal["all"], ...], named_once("rule")] = ("all",)  # (): none
    command: tuple[str, ...] = ()  # a program and its arguments: started for each alert, which it reads as JSON
    webhook_env: str = ""  # the environment variable with the URL that each alert is posted to as JSON
    min_interval_s: Annotated[float, Field(ge=0)] = 900.0  # least time between two alerts of one rule
