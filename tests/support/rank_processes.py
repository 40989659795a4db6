"""Processes that are the ranks of trainers, started once for many tests, and what the tests do in them."""

from __future__ import annotations

import atexit
import functools
import gc
import itertools
import time
import traceback
import zlib
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from rank_batches import make_rank_batch
from tiny_trainer import Context, make_batch

from headway.algorithms.samples import FlatBatch, MicroBatchArrays, SampleArrays, lay_out, slice_micro_batch
from headway.algorithms.step_plan import divide
from headway.models.shards.shard import Shard, row_width, shards_of
from headway.records.errors import LayoutsDisagree
from headway.records.training import TrainBatch
from headway.runtime.stalls.collectives import COLLECTIVES
from headway.trainer.layout_check import compare_with_one_rank
from headway.trainer.learner import Learner
from headway.trainer.service import TrainerService
from headway.trainer.sharding import is_divided

_starts = itertools.count()
Weights = dict[str, np.ndarray]


class RankProcesses:
    """``size`` processes; each call runs a function on all of them, with its rank, the size and a rendezvous."""

    def __init__(self, size: int) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(["headway.trainer.service", "headway.models.hf.model", "torch.distributed.fsdp"])
        self._pipes, self._processes = [], []
        self._starting = True
        for rank in range(size):
            pipe, remote = context.Pipe()
            process = context.Process(target=_serve, args=(remote, rank, size), daemon=True)
            process.start()
            self._pipes.append(pipe)
            self._processes.append(process)
        atexit.register(self.stop)

    def call(self, function: Callable[..., Any], folder: Path, *arguments: Any, limit_s: float = 100) -> list[Any]:
        """The function's results by rank; the first call may take four times ``limit_s``, since it waits for the start
        too. Raises RuntimeError with the traceback of a rank that failed."""
        rendezvous = f"file://{folder}/rendezvous-{next(_starts)}"
        for pipe in self._pipes:
            pipe.send((function, rendezvous, arguments))
        replies = [_reply(pipe, 4 * limit_s if self._starting else limit_s) for pipe in self._pipes]
        self._starting = False
        if failures := [f"rank {rank}: {reply[1]}" for rank, reply in enumerate(replies) if not reply[0]]:
            self.stop()
            processes.cache_clear()
            raise RuntimeError("\n".join(failures))
        return [reply[1] for reply in replies]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()


def _reply(pipe: Any, limit_s: float) -> tuple[bool, Any]:
    try:
        return pipe.recv() if pipe.poll(limit_s) else (False, "no answer")
    except (EOFError, ConnectionError):  # gloo aborts a process that receives more than it expects
        return False, "died"


@functools.cache
def processes(size: int) -> RankProcesses:
    return RankProcesses(size)


def _serve(pipe: Any, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    while True:
        function, rendezvous, arguments = pipe.recv()
        try:
            reply = True, function((rank, size, rendezvous), *arguments)
        except BaseException:
            reply = False, traceback.format_exc()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        gc.collect()  # groups in cycles keep threads, of which each takes CPU time as long as the process lives
        pipe.send(reply)


def service(mesh: tuple[int, int, str], experiment: dict[str, Any], run_id: str = "ranks") -> TrainerService:
    rank, size, rendezvous = mesh
    ranks = {"devices": ["cpu:0"] * size}
    experiment = experiment | {"trainer": experiment["trainer"] | ranks}
    options = {"rank": rank, "world_size": size, "rendezvous": rendezvous}
    folder = Path(rendezvous.removeprefix("file://")).parent
    return TrainerService(Context(), experiment=experiment, run_id=run_id_in(folder, size, run_id), **options)


def run_id_in(folder: Path, size: int, name: str = "ranks") -> str:
    """The identity of the trainers that functions called in ``folder`` start: no other test has their memory."""
    return f"{name}-{zlib.crc32(str(folder).encode()):08x}-{size}"


def share(trainer: TrainerService, batch: TrainBatch) -> FlatBatch:
    """What the client sends to this rank."""
    laid_out, ranks = lay_out(batch), trainer.ranks
    if ranks.data_size == 1:
        return laid_out
    return laid_out.take(divide(laid_out, trainer.experiment.trainer, ranks.data_size)[ranks.data_rank])


def all_rows(learner: Learner, shard: Shard) -> torch.Tensor:
    """The undivided tensor of which each rank of a copy has a ``shard``, complete on all of them."""
    ranks, undivided = learner.ranks, torch.zeros(shard.shape)
    matrix = undivided.view(-1, row_width(shard.shape))
    matrix[shard.first : shard.first + shard.rows] = shard.matrix()
    return ranks.sum_(undivided, "shards")


def complete(learner: Learner, tensors: list[torch.Tensor]) -> Weights:
    """Tensors of the trained parameters with all of their rows."""
    weights = learner.weights()
    named = zip(learner.masters.trained(), tensors, strict=True)
    if learner.trains_rows:
        shards = {name: replace(shards_of({name: weights[name]})[0], tensor=own.detach()) for name, own in named}
        return {name: all_rows(learner, shard).numpy().copy() for name, shard in shards.items()}
    return {name: tensor.detach().numpy().copy() for name, tensor in named}


def summed_gradients(learner: Learner) -> Weights:
    gradients = learner.gradients()
    learner.ranks.sum_all_(gradients, "copies" if learner.trains_rows else "all")
    return complete(learner, gradients)


def train(
    mesh: tuple[int, int, str], experiment: dict[str, Any], steps: int = 3, kind: str = "plain"
) -> dict[str, Any]:
    """Gradients of a batch before any step, gradient norms of steps, log-probabilities and the weights after them.
    ``kind``: of the batches, as of `make_rank_batch`."""
    trainer = service(mesh, experiment)
    learner = trainer.learner
    batches = [make_rank_batch(kind, number, number) for number in range(steps)]
    first_probe = trainer.score()
    trainer.policy.accumulate_gradients(share(trainer, batches[0]).arrays())
    gradients = summed_gradients(learner)
    trainer.policy.clear()
    reports = [trainer.train_step(share(trainer, batch)) for batch in batches]
    weights = complete(learner, learner.parameters)
    probe = trainer.score()
    trainer.close()
    return {
        "gradients": gradients,
        "norms": [report.metrics["grad_norm"] for report in reports],
        "metrics": reports[-1].metrics,
        "micro_batches": reports[0].micro_batches,
        "weights": weights,
        "first_probe": first_probe.paths["alone"].logprobs,
        "probe": probe.paths["alone"].logprobs,
        "hidden": first_probe.paths["packed"].hidden,
        "tokens": [(report.tokens, report.loss_tokens, report.micro_batches) for report in reports],
    }


def padded_gradients(mesh: tuple[int, int, str], experiment: dict[str, Any], plan: list[list[list[int]]]) -> Weights:
    """Gradients where rank r computes the micro-batches ``plan[r]``, and as many empty ones as others have more."""
    trainer = service(mesh, experiment)
    learner, arrays = trainer.learner, lay_out(make_batch(5, groups=4)).arrays()
    own = plan[mesh[0]] if mesh[1] > 1 else [samples for row in plan for samples in row]
    most = max(len(row) for row in plan) if mesh[1] > 1 else len(own)
    for samples in own + [[]] * (most - len(own)):
        batch = slice_micro_batch(arrays, samples) if samples else _empty(arrays)
        logprobs_m = learner.logprobs(batch, arrays, 1.0).logprobs_m
        advantages_m = torch.from_numpy(arrays.advantages_n[batch.targets_m])
        learner.backward((logprobs_m * advantages_m).sum() / arrays.loss_tokens)
    gradients = summed_gradients(learner)
    trainer.close()
    return gradients


def _empty(arrays: SampleArrays) -> MicroBatchArrays:
    none = np.zeros(0, np.int64)
    return MicroBatchArrays(
        input_ids=arrays.token_ids_n[:1],
        input_lengths=[1],
        continues=[-1],
        predictors_m=none,
        targets_m=none,
        token_rows={},
        sample_tokens=0,
    )


def saved_and_resumed(mesh: tuple[int, int, str], experiment: dict[str, Any], path: str) -> dict[str, Any]:
    """Train a step, save a checkpoint, offload, and train another."""
    trainer = service(mesh, experiment)
    trainer.train_step(share(trainer, make_batch(0)))
    trainer.save_checkpoint(path, {})
    stored = state_of(trainer)
    moved = trainer.offload()
    trainer.onload()
    storages = [tensor.untyped_storage() for tensor in trainer.learner.resident()]
    resident = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    trainer.train_step(share(trainer, make_batch(1, step=1)))
    outcome = {"stored": stored, "after": state_of(trainer), "moved": moved.moved_bytes, "resident": resident}
    trainer.close()
    return outcome


def loaded(mesh: tuple[int, int, str], experiment: dict[str, Any], path: str, output: str) -> dict[str, Any]:
    """Load a checkpoint, publish and save what it holds."""
    trainer = service(mesh, experiment)
    assert trainer.load_checkpoint(path) == 1
    state = state_of(trainer)
    published = trainer.publish(1)
    trainer.save_checkpoint(output, {})
    trainer.close()
    return {"state": state, "published": None if published is None else published.checksum}


def state_of(trainer: TrainerService) -> Weights:
    """Weights and AdamW's moments, complete."""
    learner = trainer.learner
    states = [learner.optimiser.state[parameter] for parameter in learner.parameters]
    moments = {
        f"{name}/{kind}": values
        for kind in ("exp_avg", "exp_avg_sq")
        for name, values in complete(learner, [state[kind] for state in states]).items()
    }
    return complete(learner, learner.parameters) | moments


def shard_rows(mesh: tuple[int, int, str], experiment: dict[str, Any]) -> dict[str, Any]:
    """This rank's rows of each weight: the weight's shape, the first row and the rows."""
    trainer = service(mesh, experiment)
    shards = shards_of(trainer.learner.weights())
    rows = {shard.name: (shard.shape, shard.first, shard.tensor.numpy().copy()) for shard in shards}
    trainer.close()
    return rows


def counted(mesh: tuple[int, int, str], experiment: dict[str, Any]) -> dict[str, Any]:
    """The collectives of a micro-batch, and whether what a loss gets may be overwritten."""
    trainer = service(mesh, experiment)
    learner, arrays = trainer.learner, lay_out(make_batch(5)).arrays()
    names = list[str]()
    inside = COLLECTIVES.inside
    with mock.patch.object(COLLECTIVES, "inside", lambda name: names.append(name) or inside(name)):
        logprobs_m = learner.logprobs(slice_micro_batch(arrays, [0, 1]), arrays, 1.0).logprobs_m
        gathered = len(names)
        learner.backward(logprobs_m.sum())
    is_view = logprobs_m._base is not None
    learner.model.compute(lambda: None)  # leaves what it gathers for a backward that never comes
    trainer.policy.clear()
    with torch.no_grad():
        learner.model.compute(lambda: None)
    divided = all(map(is_divided, learner.model.parameters()))
    trainer.close()
    return {"forward": names[:gathered], "backward": names[gathered:], "is_view": is_view, "divided": divided}


def compared(mesh: tuple[int, int, str], experiment: dict[str, Any]) -> tuple[str, str, float]:
    """The comparison of this layout with one rank: its result, or the error, and CPU seconds."""
    trainer = service(mesh, experiment)
    state = torch.get_rng_state()
    began = time.process_time()
    try:
        result = compare_with_one_rank(trainer.experiment, trainer.learner), ""
    except LayoutsDisagree as error:
        result = "", str(error)
    seconds = time.process_time() - began
    assert torch.equal(torch.get_rng_state(), state), "random numbers are those of a run without it"
    trainer.train_step(share(trainer, make_batch(0)))  # nothing of the comparison is left
    trainer.close()
    return *result, seconds
