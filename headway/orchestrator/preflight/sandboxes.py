"""Checks whether the run's sandboxes will work, before the start."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headway.config.schema import Experiment
from headway.records.check_report import Findings
from headway.records.errors import ConfigurationError
from headway.records.sandbox import SandboxFinding
from headway.rollout.hosting.service import load_environment
from headway.sandbox import preflight
from headway.sandbox.backends import backend_of, spec_of

KEY = "sandbox"
SANDBOXES = "headway.orchestrator.actors.sandboxes:open_sandboxes"  # by its name: workers import it
FOLDER = "sandboxes"  # of a run's: parked ones


def sandbox_findings(experiment: Experiment) -> Findings:
    """Check the experiment's sandboxes with `preflight.findings`; no findings where its environment uses none. Raises
    ConfigurationError where the backend isn't installed."""
    findings = Findings()
    if not uses_sandboxes(experiment):
        return findings
    for finding in asyncio.run(_check_backend(experiment)):
        (findings.error if finding.fatal else findings.warning)(KEY, str(finding))
    if too_few_text := _too_few(experiment):
        findings.error("sandbox.live", too_few_text)
    sandbox_limit, needed_sandboxes = experiment.sandbox.live, experiment.concurrent_rollouts
    if needed_sandboxes > sandbox_limit:
        reason = f"{needed_sandboxes} rollouts may run at once, and {sandbox_limit} sandboxes: the others wait for one"
        findings.warning("sandbox.live", reason)
    return findings


def require_shares(experiment: Experiment) -> None:
    """Raise ConfigurationError where the workers together would have more sandboxes than ``sandbox.live``."""
    if (too_few_text := _too_few(experiment)) and uses_sandboxes(experiment):
        raise ConfigurationError(too_few_text)


def _too_few(experiment: Experiment) -> str:
    live, workers = experiment.sandbox.live, experiment.environment.workers
    if live >= workers:
        return ""
    return (
        f"sandbox.live = {live} with environment.workers = {workers}: each worker needs a sandbox of its own; valid: "
        f"sandbox.live of {workers} or more, or environment.workers of {live} or fewer"
    )


def uses_sandboxes(experiment: Experiment) -> bool:
    """Whether the environment runs code in sandboxes; False if it can't be imported: reported elsewhere."""
    try:
        return experiment.environment.is_class and load_environment(experiment.environment).uses_sandbox
    except ConfigurationError:
        return False


async def _check_backend(experiment: Experiment) -> list[SandboxFinding]:
    snapshots = Path(experiment.run.directory, FOLDER)
    backend = backend_of(experiment.sandbox, snapshots=snapshots)
    try:
        spec = await spec_of(experiment.sandbox)
        return await preflight.findings(experiment.sandbox, backend, experiment.concurrent_rollouts, spec=spec)
    finally:
        await backend.close()
