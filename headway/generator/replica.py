"""One generator replica as the pool sees it, and how its process is started."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from headway.config.schema import Experiment
from headway.generator.calls import Call
from headway.records.errors import HeadwayError
from headway.records.generation import EngineStatistics, PublishedWeights
from headway.runtime.devices import lends
from headway.runtime.workers import Worker, WorkerSpec

_FACTORY = "headway.generator.service:GeneratorService"


class Replica:
    """One replica: *starting* -> *live* -> *starting* again after a death, or *lost* when it died too often."""

    def __init__(self, index: int, spec: WorkerSpec, shared: bool) -> None:
        self.index = index
        self.spec = spec
        self.shared = shared  # the trainer computes on its device as well
        self.worker: Worker | None = None
        self.resting = False  # takes no requests while another is live
        self.live = False  # takes requests: its weights are the newest that were announced when it started
        self.lost: HeadwayError | None = None
        self.version = 0  # that it applied
        self.applied: PublishedWeights | None = None  # what was applied; None: the model at the configured path
        self.calls: dict[str, Call] = {}  # by ticket
        self.outstanding_tokens = 0
        self.outbox: list[Call] = []  # to be submitted in one call
        self.aborts: list[str] = []
        self.flushing = False
        self.live_since_s = 0.0
        self.served_s = 0.0  # how long its dead incarnations were live, together
        self.restarts = 0
        self.deaths: deque[float] = deque()  # and failed restarts: served_s at each that is not forgiven
        self.past = EngineStatistics()  # counters of its dead incarnations
        self.present = EngineStatistics()  # last seen of the present one

    @classmethod
    def of(cls, index: int, device: str, experiment: Experiment, log_directory: str | Path | None) -> Replica:
        """The replica on ``device``, not started yet."""
        shared = lends(device, experiment.trainer.devices)
        return cls(index, _worker_spec(index, device, experiment, log_directory), shared)


def _worker_spec(index: int, device: str, experiment: Experiment, log_directory: str | Path | None) -> WorkerSpec:
    name = f"generator-{index}"
    settings = experiment.generator
    return WorkerSpec(
        name=name,
        factory=_FACTORY,
        arguments={
            "model_path": experiment.model.path,
            "dtype": settings.dtype,
            "native_kernels": settings.native_kernels,
            "prefill_tokens_per_step": settings.prefill_tokens_per_step,
            "slots": settings.slots,
            "max_context_tokens": experiment.max_sequence_tokens,
            "kv_capacity_tokens": settings.kv_capacity_tokens,
            "deterministic": experiment.run.deterministic,
        },
        device=device,
        log_path=Path(log_directory) / f"{name}.log" if log_directory is not None else None,
    )
