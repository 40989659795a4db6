"""Alerts of a run, delivered to a command of the user's and to a webhook.

The webhook's URL may hold a token: it comes from the environment, and no error, event or file names it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import shutil
import signal
import subprocess
import time
from pathlib import Path

from headway.config.alerts import AlertsConfig
from headway.records.errors import ConfigurationError, HeadwayError
from headway.records.ledger import EventRecord
from headway.runtime.addresses import machine_certificates
from headway.runtime.retries import backoff_s, first_cause
from headway.telemetry.exporters.exporters import Exporter, Start
from headway.telemetry.ledger import EVENT_ALERT
from headway.telemetry.pages import alert_page

COMMAND_S = 30.0  # a command that runs for longer is killed with all it started
REQUEST_S = 10.0  # a request to the webhook
ATTEMPTS = 3  # requests for one alert
RETRY_S = 1.0  # before the second, doubled before the third
LOG = "alerts.log"  # output of the command, in RUN/logs


def alert_fields(rule: str) -> dict[str, float | str]:
    """The data of an alert's event."""
    return {"rule": rule, "at": round(time.time(), 3), "host": platform.node()}


def alert_json(alert: EventRecord, folder: Path) -> bytes:
    """The alert as command and webhook get it; ``text`` is what chat services show."""
    text = f"headway {folder.name} on {alert.data['host']}, step {alert.step}: {alert.detail}"
    found = {"text": text, **alert.data, "detail": alert.detail, "run": str(folder), "step": alert.step}
    found["page"] = alert_page(str(alert.data["rule"]))
    return json.dumps(found, ensure_ascii=False).encode()


def require_command(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``command``, whose program exists. Raises ConfigurationError."""
    if command and shutil.which(command[0]) is None:
        raise ConfigurationError(f"there is no program {command[0]!r} on the path")
    return command


def webhook_url(variable: str) -> str:
    """The URL in the environment variable; "" where none is named. Raises ConfigurationError, which doesn't show it."""
    url = os.environ.get(variable, "") if variable else ""
    if variable and not url:
        raise ConfigurationError(f"the environment has no {variable}")
    if url and not url.startswith(("http://", "https://")):
        raise ConfigurationError(f"{variable} holds no such URL; valid: http://... or https://...")
    return url


class AlertCommand(Exporter):
    """Starts ``alerts.command`` for each alert, with the alert as JSON on its standard input."""

    only_event = EVENT_ALERT

    def __init__(self, start: Start) -> None:
        """Raises ConfigurationError when there is no such program."""
        self._command = require_command(start.experiment.alerts.command)
        self._folder = start.folder.resolve()
        self.place = self._command[0]

    def event(self, event: EventRecord) -> None:
        run_command(self._command, alert_json(event, self._folder), self._folder / "logs" / LOG)


class AlertWebhook(Exporter):
    """Posts each alert as JSON to the URL in ``alerts.webhook_env``."""

    only_event = EVENT_ALERT

    def __init__(self, start: Start) -> None:
        """Raises ConfigurationError when the variable isn't set, or is no URL of http or https."""
        variable = start.experiment.alerts.webhook_env
        self._url, self._folder = webhook_url(variable), start.folder.resolve()
        self.place = f"${variable}"

    def event(self, event: EventRecord) -> None:
        post(self._url, alert_json(event, self._folder))


def deliver(alert: EventRecord, alerts: AlertsConfig, folder: Path) -> None:
    """Deliver an alert from a process without exporters, and wait for it; there is nobody to report a failure to."""
    text = alert_json(alert, folder)
    with contextlib.suppress(OSError, HeadwayError):
        if alerts.command:
            run_command(alerts.command, text, folder / "logs" / LOG)
    with contextlib.suppress(OSError, HeadwayError):
        if alerts.webhook_env:
            post(webhook_url(alerts.webhook_env), text)


def run_command(command: tuple[str, ...], text: bytes, log: Path) -> None:
    """Run ``command`` with ``text`` on its standard input and its output in ``log``. Raises HeadwayError when it fails
    or takes longer than COMMAND_S."""
    with log.open("ab") as output:
        # A session of its own: Ctrl-C doesn't reach it, and at the time limit all that it started ends with it.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True)
        try:
            process.communicate(text, timeout=COMMAND_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise HeadwayError(f"{command[0]} was killed after {COMMAND_S:g} s") from None
    if process.returncode:
        raise HeadwayError(f"{command[0]} ended with exit code {process.returncode}; its output is in logs/{log.name}")


def post(url: str, text: bytes) -> None:
    """POST ``text`` as JSON, repeated after no answer, HTTP 408, 429 and 5xx. Raises HeadwayError, without the URL."""
    import httpx  # here: a run without a webhook doesn't wait for it

    logging.getLogger("httpx").setLevel(logging.WARNING)  # what it logs of each request names the URL
    cause, headers, verify = "", {"Content-Type": "application/json"}, machine_certificates()
    for attempt in range(ATTEMPTS):
        time.sleep(backoff_s(attempt, RETRY_S))
        try:  # a redirect isn't followed: the POST would become a GET, and a token go elsewhere
            status = httpx.post(url, content=text, headers=headers, timeout=REQUEST_S, verify=verify).status_code
        except (httpx.RequestError, httpx.InvalidURL) as error:
            cause = type(first_cause(error)).__name__  # only its kind: the texts of some name the URL
            continue
        if status // 100 == 2:
            return
        cause = f"HTTP {status}"
        if status not in (408, 429) and status < 500:
            break
    raise HeadwayError(f"the webhook failed: {cause}")
