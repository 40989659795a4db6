"""Checks the user's own functions, and the targets of alerts, before a run starts."""

from __future__ import annotations

import shutil
from collections.abc import Iterable

from headway.algorithms.advantages import KEY as ADVANTAGE
from headway.algorithms.advantages import resolve as resolve_advantage
from headway.algorithms.groups.hook_conformance import advantage_violations, hook_violations
from headway.algorithms.groups.hooks import resolve_hooks
from headway.config.endpoint import EnvironmentConfig
from headway.config.hooks import HOOKS, HooksConfig
from headway.config.schema import ADVANTAGES, LOSSES, Experiment
from headway.records.check_report import Findings
from headway.records.errors import ConfigurationError
from headway.records.task import Task
from headway.rollout.environments.kernel import Kernel
from headway.rollout.hosting.agents.host import KEY as AGENT
from headway.rollout.hosting.mcp.servers import require_tools
from headway.rollout.hosting.service import KEY as ENVIRONMENT
from headway.rollout.hosting.service import load_environment
from headway.rollout.makers.user_function import load_rollout_function
from headway.rollout.verifiers_environment import KEY as VERIFIERS
from headway.rollout.verifiers_environment import load as load_verifiers
from headway.runtime.clock import RealClock
from headway.runtime.hooks import load_hook
from headway.runtime.imports import import_function, require_module
from headway.telemetry.exporters.alerts import require_command, webhook_url
from headway.telemetry.exporters.callback import load_logging_callback
from headway.tokens.output_parsing import OutputFormat


def function_findings(experiment: Experiment, task: Task | None) -> Findings:
    """Check the user's functions, and the targets of alerts. Advantages and hooks are imported as the run does, and
    called on made-up groups of ``task``, where there is one. A loss runs in the trainer's process and needs torch, so
    only its module is searched for (the rest is for ``python -m headway.trainer.loss_conformance``). The verifier is
    really called, elsewhere."""
    findings = Findings()
    for advantage in dict.fromkeys(rule.advantage for rule in experiment.rules.algorithms):
        with findings.refused(ADVANTAGE):
            resolve_advantage(advantage)
            if advantage not in ADVANTAGES:
                for violation in advantage_violations(load_hook(ADVANTAGE, advantage, {}, ("rewards_g",))):
                    findings.error(ADVANTAGE, violation)
    for loss in dict.fromkeys(rule.loss for rule in experiment.rules.algorithms):
        with findings.refused("algorithm.loss"):
            if loss not in LOSSES:
                require_module(loss, "algorithm.loss", LOSSES)
    _check_agent(experiment.environment, findings)
    with findings.refused("alerts.command"):
        require_command(experiment.alerts.command)
    with findings.refused("alerts.webhook_env"):
        webhook_url(experiment.alerts.webhook_env)
    for hook, builtin_names in HOOKS.items():
        function, key = getattr(experiment.hooks, hook), f"hooks.{hook}"
        if function in builtin_names:
            continue
        with findings.refused(key):
            if hook == "rollout":
                load_rollout_function(function)
            elif hook == "logging":
                load_logging_callback(function)
            else:
                hooks = resolve_hooks(HooksConfig(**{hook: function}))
                for violation in hook_violations(hooks, task) if task is not None else ():
                    findings.error(key, violation)
    return findings


def _check_agent(environment: EnvironmentConfig, findings: Findings) -> None:
    if environment.function:
        with findings.refused(AGENT):
            import_function(environment.function, AGENT, (), asynchronous=True)
    elif environment.name == "verifiers":
        with findings.refused(VERIFIERS):
            load_verifiers(environment.parameters)
    elif environment.is_class:
        with findings.refused(ENVIRONMENT):
            environment_class = load_environment(environment)
            require_tools(environment.mcp, list(environment_class.offered.values()), RealClock())
    elif environment.command and shutil.which(environment.command[0]) is None:
        findings.error(AGENT, f"there is no program {environment.command[0]!r} on the path")


def require_known_calls(environment: EnvironmentConfig, written: OutputFormat) -> None:
    """Raise ConfigurationError where the environment has tools, and the policy's calls of them can't be parsed."""
    if written.unknown and environment.is_class and (environment.mcp or load_environment(environment).offered):
        raise ConfigurationError(f"environment.name = {environment.name!r} has tools, and {written.unknown}")


async def require_kernel_services(experiment: Experiment, tasks: Iterable[Task]) -> None:
    """Raise ConfigurationError where ``environment.name = "kernel"`` can't judge answers to the tasks."""
    if experiment.environment.name == "kernel":
        kernel = load_environment(experiment.environment)
        assert isinstance(kernel, Kernel)
        await kernel.require_services(tasks)
