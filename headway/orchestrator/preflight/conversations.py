"""Checks before the start what rollouts of several turns need of the model, and agents of the network."""

from __future__ import annotations

from collections.abc import Iterator

from headway.config.schema import Experiment
from headway.records.check_report import Finding
from headway.records.errors import ConfigurationError
from headway.runtime.addresses import is_loopback, require_free


def conversation_findings(experiment: Experiment, has_chat_template: bool) -> Iterator[Finding]:
    """``has_chat_template``: the model's folder. Agents may do without, environments' replies are messages."""
    path = experiment.model.path
    if experiment.environment.replies and not has_chat_template:
        message = f"{path} has no chat template, and what an environment says are messages: add chat_template.jinja"
        yield Finding(level="error", key="environment.name", message=message)
    if not experiment.environment.calls:
        return
    address = experiment.endpoint.address
    try:
        require_free(address)
    except ConfigurationError as error:
        yield Finding(level="error", key="endpoint.address", message=str(error))
    if not is_loopback(address):
        message = f"{address}: other machines reach it; each rollout's key opens that rollout alone"
        yield Finding(level="info", key="endpoint.address", message=message)
    if not has_chat_template:
        message = f"{path} has no chat template: agents can call /v1/completions and nothing else"
        yield Finding(level="warning", key="environment.name", message=message)
