"""Opens the hosts of multi-turn rollouts: of agents that call the model, or of environments that reply to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headway.config.schema import Experiment
from headway.generator.recording.sessions import Sessions
from headway.orchestrator.actors.agents import endpoint_of, open_agents
from headway.orchestrator.actors.remote import open_remote
from headway.orchestrator.preflight.hooks import require_known_calls
from headway.orchestrator.preflight.sandboxes import SANDBOXES, require_shares
from headway.rollout.hosting.client import EnvironmentPool
from headway.rollout.makers.environment import Environments
from headway.rollout.makers.select import MultiTurnHost
from headway.runtime.clock import Clock
from headway.runtime.run_directory import RunDirectory
from headway.runtime.stalls.waits import Waits
from headway.runtime.workers import EventCallback, Launcher
from headway.tokens.continuation import Chat
from headway.tokens.tokenizer import Tokenizer


@asynccontextmanager
async def open_multi_turn_host(
    experiment: Experiment,
    launcher: Launcher,
    clock: Clock,
    on_event: EventCallback,
    directory: RunDirectory | None = None,
    waits: Waits | None = None,
) -> AsyncIterator[MultiTurnHost | None]:
    """Run the host of the experiment's agents, environments or outside workers within the block. Yields None where
    ``environment.name`` asks for single turns. ``directory``: the run's, for the agents' output and parked sandboxes.
    ``waits``: where waits for outside workers are registered. Raises ConfigurationError."""
    if experiment.environment.name == "remote":
        async with open_remote(experiment, clock, on_event, directory, waits) as remote_host:
            yield remote_host
        return
    logs, started = (None, None) if directory is None else (directory.logs, directory.started())
    if not experiment.environment.is_class:
        async with open_agents(experiment, on_event, None if logs is None else logs / "agents", started) as agents:
            yield agents
        return
    require_shares(experiment)
    endpoint = endpoint_of(experiment)
    chat = Chat(Tokenizer.of(experiment, started), endpoint.tools)
    require_known_calls(experiment.environment, chat.written)
    conversations = Sessions(chat, endpoint, experiment.max_sequence_tokens, on_event)
    pool = EnvironmentPool(
        launcher,
        experiment.environment,
        experiment.sandbox,
        clock,
        sandboxes=SANDBOXES,
        run=experiment.run.directory,
        seed=experiment.run.seed,
        snapshots=None if directory is None else directory.sandboxes,
        log_folder=logs,
        on_event=on_event,
    )
    try:
        await pool.start()
        yield Environments(conversations=conversations, pool=pool)
    finally:
        await pool.stop()
