"""A replica whose vLLM keeps the old output head: what headway's remedy and its probes are there for."""

from __future__ import annotations

from typing import Any

from headway.generator.service import GeneratorService
from headway.runtime.child import WorkerContext


class StaleHead(GeneratorService):
    """Tied heads are not packed again after an update."""

    def __init__(self, context: WorkerContext, **settings: Any) -> None:
        super().__init__(context, **settings)
        from headway.generator.engines.vllm import worker

        worker.repack_tied_heads = lambda model: None
