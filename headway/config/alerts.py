"""`[alerts]`"""

from __future__ import annotations

from typing import Annotated, Literal

from headway.config.section import Section, named_once

AlertRule = Literal["stall", "no_step", "skipped", "kl", "entropy", "reward_hacking", "length", "disk"]


class AlertsConfig(Section):
    """Alerts: the rules that raise them, and whom they reach: docs/alerts.md."""

    rules: Annotated[tuple[Literal[AlertRule, "all"], ...], named_once("rule")] = ("all",)  # (): none
    command: tuple[str, ...] = ()  # a program and its arguments: started for each alert, which it reads as JSON
    webhook_env: str = ""  # the environment variable with the URL that each alert is posted to as JSON
