"""Checks, before the start, the chat template for multi-turn rollouts and the network address for agents."""

from __future__ import annotations

from headway.config.schema import Experiment
from headway.records.check_report import Findings
from headway.runtime.addresses import is_loopback, listening_socket, service_keys


def conversation_findings(experiment: Experiment, has_chat_template: bool) -> Findings:
    """Check what multi-turn rollouts need. ``has_chat_template``: whether the model's folder has one, which agents can
    do without; the replies of environments are messages."""
    findings, no_template = Findings(), f"{experiment.model.path} has no chat template"
    if experiment.environment.is_class and not has_chat_template:
        remedy = "and replies of an environment are messages: add chat_template.jinja"
        findings.error("environment.name", f"{no_template}, {remedy}")
    if experiment.environment.calls:
        address = experiment.endpoint.address
        with findings.refused("endpoint.address"):
            listening_socket(address).close()
        if experiment.environment.name == "remote":
            keys, address_text = experiment.buffer.service.keys, f"endpoint.address = {address!r}"
            with findings.refused("buffer.service.keys"):
                service_keys(keys, "buffer.service.keys =", address, address_text)
        elif not is_loopback(address):
            reason = f"{address}: other machines reach it; each rollout's key opens that rollout alone"
            findings.info("endpoint.address", reason)
        if not has_chat_template:
            findings.warning("environment.name", f"{no_template}: agents can call /v1/completions and nothing else")
    return findings
