"""Versions that reach an engine by way of two mirrors, as on a run's nodes: by deltas where there are some."""

from __future__ import annotations

import copy
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, cast

import torch
from mirrored_weights import Context

from headway.models.loading import weights_of
from headway.records.generation import UpdateMode
from headway.weights.mirror import MirrorService
from headway.weights.shared_memory import Publisher
from tests.conformance import engine as conformance
from tests.conformance.reference import forced_logprobs

VERSIONS, CHANGED = 10, 0.02
NATS = 1e-3
KEY = "k" * 32


def check_versions_by_deltas(engine: Any, model: Any, folder: Path, mode: UpdateMode = "keep") -> int:
    """Apply versions of which a share of each tensor changes, with a request in flight at each; what the engine samples
    afterwards is each version's. Returns how many versions came by deltas."""
    settings: dict[str, Any] = {"key": KEY, "epoch": 1, "orphan_s": 10.0, "ports": [0], "host": "127.0.0.1"}
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    session = conformance.Session(engine)
    with ExitStack() as stack:
        publisher = stack.enter_context(Publisher(folder.name, directory=folder, whole_every=1000))
        context = cast("Any", Context())
        mirrors = (MirrorService(context, run_id=folder.name, node=node, **settings) for node in "ab")
        source, replica = (stack.enter_context(closing(mirror)) for mirror in mirrors)
        for version in range(1, VERSIONS + 1):
            for weight in model.parameters():
                is_changed = torch.rand(weight.shape, generator=generator) < CHANGED
                weight.data[is_changed] *= 1.25
            session.submit(conformance.request(f"crossing {version}", max_tokens=12))
            session.step(2)
            published = publisher.publish(version, weights_of(model))
            source.serve_published(published)
            local = replica.fetch(published, [(source.address(), ())])
            assert local.path != published.path
            engine.apply(local, mode)
            session.run()
            session.submit(conformance.request(f"after {version}", max_tokens=20))
            result = session.run()[f"after {version}"]
            assert [span.version for span in result.response.versions] == [version]
            expected = forced_logprobs(model, (5, 6, 7), result.response.ids, 1.0)
            assert (torch.tensor(result.response.logprobs) - expected).abs().max() <= NATS
        return replica.versions_by_deltas
