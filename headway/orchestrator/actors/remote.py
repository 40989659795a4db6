"""Opens the service for a run's outside workers: leases of members, and the endpoint that records their model calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headway.config.schema import Experiment
from headway.generator.recording.sessions import Sessions
from headway.orchestrator.actors.agents import endpoint_of
from headway.rollout.makers.outside_workers import LeaseManager, RemoteHost
from headway.runtime.addresses import service_keys
from headway.runtime.clock import Clock
from headway.runtime.run_directory import RunDirectory
from headway.runtime.stalls.waits import Waits
from headway.runtime.workers import EventCallback
from headway.telemetry.ledger import EVENT_SERVICE
from headway.tokens.continuation import Chat
from headway.tokens.tokenizer import Tokenizer


@asynccontextmanager
async def open_remote(
    experiment: Experiment,
    clock: Clock,
    on_event: EventCallback,
    directory: RunDirectory | None = None,
    waits: Waits | None = None,
) -> AsyncIterator[RemoteHost]:
    """Run the service at ``endpoint.address`` within the block. ``directory``: the run's. ``waits``: where offers that
    no worker leases are registered. Raises ConfigurationError for an address that is in use, and for one that other
    machines reach without keys."""
    from headway.generator.endpoint.api_keys import ApiKeys
    from headway.generator.endpoint.app import App  # an HTTP server's modules, for those who need one
    from headway.generator.endpoint.server import serving
    from headway.orchestrator.actors.buffer_api import BufferApi

    service, bind_address = experiment.buffer.service, experiment.endpoint.address
    keys = service_keys(service.keys, "buffer.service.keys =", bind_address, f"endpoint.address = {bind_address!r}")
    endpoint = endpoint_of(experiment)
    chat = Chat(Tokenizer.of(experiment, None if directory is None else directory.started()), endpoint.tools)
    context_tokens = experiment.max_sequence_tokens
    sessions = Sessions(chat, endpoint, context_tokens, on_event)
    manager = LeaseManager(service.lease_s, clock, waits, on_event)
    environment = experiment.environment
    host = RemoteHost(environment=environment, endpoint=endpoint, conversations=sessions, lease_manager=manager)
    paths = (None, None) if directory is None else (directory.buffer, directory.demonstrations)
    api = BufferApi(host, ApiKeys(keys), chat.tokenizer, *paths)
    app = App(sessions, chat, endpoint, experiment.model.path, context_tokens, further=api.routes, on_event=on_event)
    async with serving(app, endpoint) as address:
        sessions.address = address
        on_event(EVENT_SERVICE, f"workers lease members at {address}")
        yield host
