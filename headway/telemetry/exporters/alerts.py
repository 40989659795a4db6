"""Delivery of a run's alerts to a command of the user and to a webhook.

The webhook's URL may hold a token, so it comes from the environment, and no error, event or file names it.
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
from headway.runtime.retries import backoff_s, socket_error_of
from headway.telemetry.exporters.exporters import Exporter, ExporterContext
from headway.telemetry.ledger import EVENT_ALERT
from headway.telemetry.pages import alert_page

COMMAND_S = 30.0  # a command that runs for longer is killed with its child processes
REQUEST_S = 10.0  # a request to the webhook
ATTEMPTS = 3  # requests for one alert
RETRY_S = 1.0  # before the second, doubled before the third
LOG = "alerts.log"  # output of the command, in RUN/logs


def alert_fields(rule: str) -> dict[str, float | str]:
    """The data of an alert's event."""
    return {"rule": rule, "at": round(time.time(), 3), "host": platform.node()}


def alert_json(alert: EventRecord, folder: Path) -> bytes:
    """The JSON of an alert for command and webhook; chat services display its ``text``."""
    text = f"headway {folder.name} on {alert.data['host']}, step {alert.step}: {alert.detail}"
    payload = {"text": text, **alert.data, "detail": alert.detail, "run": str(folder), "step": alert.step}
    payload["page"] = alert_page(str(alert.data["rule"]))
    return json.dumps(payload, ensure_ascii=False).encode()


def require_command(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``command``, whose program exists. Raises ConfigurationError."""
    if command and shutil.which(command[0]) is None:
        raise ConfigurationError(f"there is no program {command[0]!r} on the path")
    return command


def webhook_url(variable: str) -> str:
    """The URL in an environment variable; "": no variable is named. Raises ConfigurationError, without the URL."""
    url = os.environ.get(variable, "") if variable else ""
    if variable and not url:
        raise ConfigurationError(f"the environment has no {variable}")
    if url and not url.startswith(("http://", "https://")):
        raise ConfigurationError(f"{variable} isn't a URL; valid: http://... or https://...")
    return url


class AlertCommand(Exporter):
    """Starts ``alerts.command`` for each alert, with the alert as JSON on its standard input."""

    only_event = EVENT_ALERT

    def __init__(self, context: ExporterContext) -> None:
        """Raises ConfigurationError if the command's program doesn't exist."""
        self._command = require_command(context.experiment.alerts.command)
        self._folder = context.folder.resolve()
        self.destination = self._command[0]

    def event(self, event: EventRecord) -> None:
        run_command(self._command, alert_json(event, self._folder), self._folder / "logs" / LOG)


class AlertWebhook(Exporter):
    """Posts each alert as JSON to the URL in ``alerts.webhook_env``."""

    only_event = EVENT_ALERT

    def __init__(self, context: ExporterContext) -> None:
        """Raises ConfigurationError if the variable isn't set, or holds no URL of http or https."""
        variable_name = context.experiment.alerts.webhook_env
        self._url, self._folder = webhook_url(variable_name), context.folder.resolve()
        self.destination = f"${variable_name}"

    def event(self, event: EventRecord) -> None:
        post(self._url, alert_json(event, self._folder))


def deliver(alert: EventRecord, alerts: AlertsConfig, folder: Path) -> None:
    """Deliver an alert from a process without exporters, and wait for it; failures are ignored, since such a process
    has no way to report them."""
    payload = alert_json(alert, folder)
    with contextlib.suppress(OSError, HeadwayError):
        if alerts.command:
            run_command(alerts.command, payload, folder / "logs" / LOG)
    with contextlib.suppress(OSError, HeadwayError):
        if alerts.webhook_env:
            post(webhook_url(alerts.webhook_env), payload)


def run_command(command: tuple[str, ...], text: bytes, log: Path) -> None:
    """Run ``command`` with ``text`` on its standard input and its output in ``log``. Raises HeadwayError when it fails
    or takes longer than COMMAND_S."""
    with log.open("ab") as file:
        # A separate session: Ctrl-C doesn't reach the command, and the time limit also ends its child processes.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file, stderr=file, start_new_session=True)
        try:
            process.communicate(text, timeout=COMMAND_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise HeadwayError(f"{command[0]} was killed after {COMMAND_S:g} s") from None
    if process.returncode:
        raise HeadwayError(f"{command[0]} ended with exit code {process.returncode}; its output is in logs/{log.name}")


def post(url: str, text: bytes) -> None:
    """POST ``text`` as JSON; retry after no answer, HTTP 408, 429 and 5xx. Raises HeadwayError, without the URL."""
    import httpx  # here: a run without a webhook doesn't wait for the import

    logging.getLogger("httpx").setLevel(logging.WARNING)  # httpx logs the URL of each request
    cause_text, headers, ssl_context = "", {"Content-Type": "application/json"}, machine_certificates()
    for attempt in range(ATTEMPTS):
        time.sleep(backoff_s(attempt, RETRY_S))
        try:  # a redirect isn't followed: the POST would become a GET, and a token go elsewhere
            status = httpx.post(url, content=text, headers=headers, timeout=REQUEST_S, verify=ssl_context).status_code
        except (httpx.RequestError, httpx.InvalidURL) as error:
            cause_text = type(socket_error_of(error)).__name__  # only its type: some messages name the URL
            continue
        if status // 100 == 2:
            return
        cause_text = f"HTTP {status}"
        if status not in (408, 429) and status < 500:
            break
    raise HeadwayError(f"the webhook failed: {cause_text}")
