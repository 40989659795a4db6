"""Opens the services that a run's agents need: the endpoint that records them, and the host of their processes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path

from headway.config.endpoint import EndpointConfig
from headway.config.schema import Experiment
from headway.generator.recording.sessions import Sessions
from headway.rollout.hosting.agents.processes import AgentProcesses
from headway.rollout.makers.agent import Agents
from headway.rollout.verifiers_environment import PLAYER
from headway.runtime.workers import EventCallback
from headway.tokens.continuation import Chat
from headway.tokens.tokenizer import Tokenizer


@asynccontextmanager
async def open_agents(
    experiment: Experiment, on_event: EventCallback, logs: Path | None = None, started: datetime | None = None
) -> AsyncIterator[Agents | None]:
    """Run the endpoint and the agents' host within the block. Yields None where ``environment.name`` asks for no
    agents. ``logs``: the folder of the agents' output. ``started``: the run's start, which chat templates may show.
    Raises ConfigurationError for an address that is in use and a function that can't be imported."""
    environment = experiment.environment
    if environment.name == "single_turn":
        yield None
        return
    from headway.generator.endpoint.app import App  # an HTTP server's modules, for those who need one
    from headway.generator.endpoint.server import serving

    endpoint = endpoint_of(experiment)
    chat = Chat(Tokenizer.of(experiment, started), endpoint.tools)
    context_tokens = experiment.max_sequence_tokens
    sessions = Sessions(chat, endpoint, context_tokens, on_event)
    app = App(sessions, chat, endpoint, experiment.model.path, context_tokens, on_event=on_event)
    async with serving(app, endpoint) as address:
        sessions.address = address
        function, settings = environment.function, None
        if environment.name == "verifiers":
            function, settings = PLAYER, environment.parameters
        processes = AgentProcesses(function, settings, logs=logs, on_event=on_event)
        try:
            await processes.start()
            yield Agents(environment=environment, endpoint=endpoint, conversations=sessions, processes=processes)
        finally:
            await processes.stop()


def endpoint_of(experiment: Experiment) -> EndpointConfig:
    """The settings of a run's endpoint. A call may take as long as its rollout: one that ended before would count as
    the agent's failure."""
    environment = experiment.environment
    variables = {entry.api_key_env for entry in (*environment.models.values(), *environment.mcp)}
    return EndpointConfig.of(
        experiment.endpoint,
        call_timeout_s=experiment.rollout.timeout_s,
        observes=any(rule.environment_coefficient > 0 for rule in experiment.rules.algorithms),
        secrets=tuple(sorted(filter(None, (os.environ.get(name, "") for name in variables if name)))),
    )
