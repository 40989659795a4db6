"""`[alerts]`: the rules that raise alerts, and the recipients."""

from __future__ import annotations

from typing import Annotated, Literal

from headway.config.section import Section, distinct_names

AlertRule = Literal["stall", "no_step", "skipped", "kl", "entropy", "reward_hacking", "length", "disk"]


class AlertsConfig(Section):
    """Alerts: the rules that raise them, and their recipients: docs/alerts.md."""

    rules: Annotated[tuple[Literal[AlertRule, "all"], ...], distinct_names("rule")] = ("all",)  # (): none
    command: tuple[str, ...] = ()  # a program and its arguments: started for each alert, which it reads as JSON
    webhook_env: str = ""  # the environment variable with the URL that each alert is posted to as JSON
