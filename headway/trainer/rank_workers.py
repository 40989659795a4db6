"""The ranks of a model in training as worker processes, started, called and ended together. Torch-free."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from headway.config.schema import Experiment
from headway.records.errors import HeadwayError, RemoteError
from headway.runtime.devices import parse_device
from headway.runtime.fork_server import MODEL_CODE
from headway.runtime.worker_slots import typed_cause
from headway.runtime.workers import Launcher, WorkerHandle, WorkerSpec, call_each

T = TypeVar("T")

_DEATH_S = 5.0  # longest time from the others' broken connections until a rank's death is noticed


class RankWorkers:
    """The processes of all ranks, one per device.

    Lifecycle: `start` -> calls -> `stop` or `kill`. When a rank dies, the call in progress raises WorkerDied, because
    collectives can't complete without it.
    """

    def __init__(
        self,
        launcher: Launcher,
        experiment: Experiment,
        run_id: str,
        devices: Sequence[str],
        factory: str,
        *,
        name: str = "trainer",
        log_directory: str | Path | None = None,
        host_of: Callable[[str], Awaitable[str]] | None = None,
    ) -> None:
        """``factory``: the workers' class, which is given the experiment, ``run_id``, its rank, their number and the
        rendezvous. ``name``: beginning of the ranks' names. ``host_of(node)``: the address by which others reach a node
        ("": this machine); needed for ranks on nodes."""
        self._launcher = launcher
        self._experiment = experiment
        self._run_id = run_id
        self.devices = tuple(devices)  # of the next start
        self._factory = factory
        self._name = name
        self._log_directory = log_directory
        self.workers: tuple[WorkerHandle, ...] = ()  # the ranks, rank 0 first; empty when none is running
        self._host_of = host_of
        self._rendezvous = ""
        self._starts = 0
        self._compared = set[int]()  # numbers of ranks whose gradients are those of one
        self.more_arguments: dict[str, Any] = {}  # of the workers' class

    async def start(self) -> None:
        """Start one process per device; returns when all have loaded the model.

        Raises the error of the first rank that fails, after killing all others, and LayoutsDisagree if as many ranks
        compute other gradients than one.
        """
        # A rendezvous file can be used for one start only, and must outlive it: groups may be made lazily.
        self._rendezvous = await self._make_rendezvous()
        specs = [self._spec(rank, device) for rank, device in enumerate(self.devices)]
        start_tasks = [asyncio.ensure_future(self._launcher.start(spec)) for spec in specs]
        try:
            self.workers = tuple(await asyncio.gather(*start_tasks))
        except RemoteError as error:
            raise typed_cause(error) from error
        finally:
            if not self.workers:
                await self._kill_started(start_tasks)
        await self._compare_with_one_rank()

    async def _compare_with_one_rank(self) -> None:
        ranks = len(self.devices)
        if ranks in self._compared or (ranks == 1 and self._experiment.trainer.host_memory != "all"):
            return
        try:
            await self.call_all("compare_with_one_rank")
        except BaseException:
            await self.kill()
            raise
        self._compared.add(ranks)

    async def stop(self, grace_s: float = 10.0) -> None:
        """Stop all ranks gracefully; their published weights are unlinked."""
        workers, self.workers = self.workers, ()
        await asyncio.gather(*(worker.stop(grace_s) for worker in workers))
        self._remove_rendezvous()

    async def kill(self) -> None:
        """Kill all ranks in any state; returns when they are dead."""
        workers, self.workers = self.workers, ()
        for worker in workers:
            worker.kill()
            await worker.died
        self._remove_rendezvous()

    async def call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all ranks with the same arguments; results in their order."""
        return await self.call_each(method, [arguments] * len(self._running()))

    async def call_each(self, method: str, arguments_by_rank: Sequence[Sequence[Any]]) -> list[Any]:
        """Call a method of every rank with its own arguments; results in their order. Raises the first failure."""
        workers = self._running()
        try:
            return await with_own_cause(call_each(workers, method, arguments_by_rank))
        except RemoteError:
            # When a rank dies in the middle of a sum, the others' broken connections may be known before its death is.
            if len(workers) > 1:
                death_futures: list[Any] = [worker.died for worker in workers]
                done, _ = await asyncio.wait(death_futures, timeout=_DEATH_S, return_when=asyncio.FIRST_COMPLETED)
                for death_future in done:
                    raise death_future.result() from None
            raise

    async def call_all_to_end(self, method: str, *arguments: Any) -> list[Any]:
        """`call_all` that raises the first failure when the call has ended on all ranks, or one of them is dead."""
        calls = (with_own_cause(worker.call(method, *arguments)) for worker in self._running())
        outcomes = await self.until_death(asyncio.gather(*calls, return_exceptions=True))
        for failure in outcomes:
            if isinstance(failure, BaseException):
                raise failure
        return outcomes

    async def until_death(self, call: Awaitable[T]) -> T:
        """Await a call of some ranks beside their other calls; raises WorkerDied as soon as a rank is dead: others may
        wait for it in a collective."""

        async def ended() -> T:
            return await call

        task = asyncio.create_task(ended())
        death_futures: list[Any] = [worker.died for worker in self._running()]
        try:
            await asyncio.wait([task, *death_futures], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise next(future.result() for future in death_futures if future.done())
        finally:
            task.cancel()

    def _running(self) -> tuple[WorkerHandle, ...]:
        if not self.workers:
            raise HeadwayError("the trainer is not running: start() or restart() it first")
        return self.workers

    def _spec(self, rank: int, device: str) -> WorkerSpec:
        name = f"{self._name}-{rank}"
        return WorkerSpec(
            name=name,
            factory=self._factory,
            arguments={
                "experiment": self._experiment.model_dump(mode="json"),
                "run_id": self._run_id,
                "rank": rank,
                "world_size": len(self.devices),
                "rendezvous": self._rendezvous,
                **self.more_arguments,
            },
            device=device,
            preload=MODEL_CODE,
            log_path=None if self._log_directory is None else Path(self._log_directory) / f"{name}.log",
        )

    async def _kill_started(self, start_tasks: list[asyncio.Task[WorkerHandle]]) -> None:
        """Kill the other ranks after one failed to start, since they would wait for it forever."""
        for start_task in start_tasks:
            start_task.cancel()
        for worker_or_error in await asyncio.gather(*start_tasks, return_exceptions=True):
            if not isinstance(worker_or_error, BaseException):
                worker_or_error.kill()
                await worker_or_error.died
        self._remove_rendezvous()

    async def _make_rendezvous(self) -> str:
        """The ranks' rendezvous: a file of this machine, or a port of rank 0's node if any rank is on a node."""
        devices = [parse_device(name) for name in self.devices]
        if len(devices) == 1 or self._host_of is None or not any(device.node for device in devices):
            return f"file://{tempfile.gettempdir()}/headway-ranks-{uuid.uuid4().hex}"
        self._starts += 1
        ports = self._experiment.cluster.ports
        # Another port at each start: the last start's may still be closing.
        return f"tcp://{await self._host_of(devices[0].node)}:{ports[self._starts % len(ports)]}"

    def _remove_rendezvous(self) -> None:
        if self._rendezvous.startswith("file://"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._rendezvous.removeprefix("file://"))


async def with_own_cause(call: Coroutine[Any, Any, T]) -> T:
    """Await a call to a worker; its RemoteError is raised as the error of Headway that caused it, if there is one."""
    try:
        return await call
    except RemoteError as error:
        raise typed_cause(error) from error
