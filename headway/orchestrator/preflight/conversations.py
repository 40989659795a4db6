"""Checks before the start what rollouts of several turns need of the model, and agents of the network."""

from __future__ import annotations

from headway.config.schema import Experiment
from headway.orchestrator.preflight.findings import Findings
from headway.runtime.addresses import is_loopback, listening, service_keys


def conversation_findings(experiment: Experiment, has_chat_template: bool) -> Findings:
    """``has_chat_template``: the model's folder. Agents may do without, environments' replies are messages."""
    findings, lacks = Findings(), f"{experiment.model.path} has no chat template"
    if experiment.environment.replies and not has_chat_template:
        needed = "and what an environment says are messages: add chat_template.jinja"
        findings.error("environment.name", f"{lacks}, {needed}")
    if experiment.environment.calls:
        address = experiment.endpoint.address
        with findings.refused("endpoint.address"):
            listening(address).close()
        if experiment.environment.name == "remote":
            keys, named = experiment.buffer.service.keys, f"endpoint.address = {address!r}"
            with findings.refused("buffer.service.keys"):
                service_keys(keys, "buffer.service.keys =", address, named)
        elif not is_loopback(address):
            message = f"{address}: other machines reach it; each rollout's key opens that rollout alone"
            findings.info("endpoint.address", message)
        if not has_chat_template:
            findings.warning("environment.name", f"{lacks}: agents can call /v1/completions and nothing else")
    return findings
