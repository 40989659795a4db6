"""Supervised fine-tuning by next-token cross-entropy over the tokens that carry loss.

Legend: ``_n`` one value per token, ``_s`` one value per sequence.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headway.algorithms.packing import pack
from headway.algorithms.samples import EMPTY_MICRO_BATCH, MicroBatchArrays, SampleArrays, slice_micro_batch
from headway.config.load import validate_experiment
from headway.records.errors import ConfigurationError, NoProgress
from headway.records.training import MAX_CONSECUTIVE_SKIPS
from headway.trainer.checkpoints import CheckpointState
from headway.trainer.learner import Update
from headway.trainer.micro_batch_limit import MicroBatchLimit, reporting_shortage
from headway.trainer.optimizer import learning_rate
from headway.trainer.saving import SavedFolder
from headway.trainer.service import ModelService, open_ranks, use_device


class SupervisedService(ModelService):
    """The worker class of a rank of SFT, with the RL trainer's model and optimiser and next-token cross-entropy as
    loss. Every rank has all sequences, draws the same batches, and computes its share of them.

    Lifecycle: `prepare` once, then `steps` any number of times, with `publish` and `save` in between and at the end.
    """

    def __init__(
        self,
        context: Any,
        *,
        experiment: dict[str, Any],
        run_id: str,
        rank: int = 0,
        world_size: int = 1,
        rendezvous: str = "",
    ) -> None:
        validated = validate_experiment(experiment, "experiment")
        self.settings = validated.sft
        trainer = validated.trainer.model_copy(update={"devices": self.settings.devices})
        ranks = open_ranks(trainer, rank, world_size, rendezvous, use_device(context.device))
        super().__init__(context, validated, run_id, trainer, ranks)
        self._limit = MicroBatchLimit(validated.trainer, self.learner, may_halve=True)
        self.skipped = 0  # steps whose loss or gradient wasn't finite
        self._skipped_in_a_row = 0
        self._token_ids_n = np.zeros(0, np.int32)
        self._learned_n = np.zeros(0, np.bool_)
        self._lengths_s = self._starts_s = np.zeros(0, np.int64)
        self._held_out: list[int] = []
        self._trained = 0  # number of sequences trained on
        self._order: Iterator[int] = iter(())

    def prepare(
        self,
        token_ids_n: npt.NDArray[np.int32],
        learned_n: npt.NDArray[np.bool_],
        lengths_s: npt.NDArray[np.int64],
        held_out: int = 0,
    ) -> None:
        """Set the concatenated sequences, and their tokens that carry loss (tasks/sft_data.py).
        ``held_out``: number of sequences, drawn by the seed, that are only evaluated (`held_out_loss`)."""
        self._token_ids_n, self._learned_n = token_ids_n, learned_n
        self._lengths_s, self._starts_s = lengths_s, np.cumsum(lengths_s) - lengths_s
        count, seed = len(lengths_s), self.experiment.run.seed
        self._held_out = sorted(np.random.default_rng([seed, count]).permutation(count)[:held_out].tolist())
        trained_indices = np.delete(np.arange(count), self._held_out)
        self._trained = len(trained_indices)
        self._order = (int(trained_indices[i]) for i in _endless_permutations(self._trained, seed))

    def held_out_loss(self) -> float:
        """The mean cross-entropy over the loss tokens of the held-out sequences, in nats."""
        self._require_equal("held_out_loss")
        arrays, loss_sum = self._arrays(self._held_out), 0.0
        with torch.no_grad():
            for batch in self._micro_batches(arrays):
                loss_sum -= float(self.learner.logprobs(batch, arrays, 1.0).logprobs_m.sum())
        return self._sum(loss_sum)[0] / arrays.loss_tokens

    @reporting_shortage()
    def steps(self, count: int) -> dict[str, float]:
        """Take ``count`` optimiser steps.

        Returns version, the last step's loss, learning_rate and grad_norm, loss_mean over the steps, tokens,
        tokens_per_s, effective_token_share (tokens with loss ÷ tokens computed), flops, seconds, and, since the
        start, skipped steps and epochs. Raises NoProgress after MAX_CONSECUTIVE_SKIPS skipped steps.
        """
        if not len(self._lengths_s):
            raise ConfigurationError("prepare() must come before steps()")
        self._require_equal("steps", count=count)
        started = time.perf_counter()
        losses: list[float] = []
        tokens = loss_tokens = 0
        flops = grad_norm = rate = 0.0
        for _ in range(count):
            rate = learning_rate(self.version, self.settings, self.settings.total_steps(self._trained))
            arrays = self._arrays([next(self._order) for _ in range(self.settings.batch_sequences)])
            rank_loss, rank_flops = self._accumulate(arrays)
            update = self.learner.update(self.learner.optimiser_settings(rate), rank_loss)
            self._count(update)
            loss, step_flops = self._sum(rank_loss, rank_flops)
            grad_norm = update.grad_norm
            losses.append(loss)
            tokens += arrays.tokens - arrays.samples
            loss_tokens += arrays.loss_tokens
            flops += step_flops
        seconds = time.perf_counter() - started
        return {
            "version": self.version,
            "loss": losses[-1] if losses else math.nan,
            "loss_mean": sum(losses) / max(1, len(losses)),
            "learning_rate": rate,
            "grad_norm": grad_norm,
            "tokens": tokens,
            "tokens_per_s": tokens / max(seconds, 1e-9),
            "effective_token_share": loss_tokens / max(1, tokens),
            "flops": flops,
            "seconds": seconds,
            "skipped": self.skipped,
            "epochs": (self.version + self.skipped) * self.settings.batch_sequences / self._trained,
        }

    def _count(self, update: Update) -> None:
        if update.applied:
            self.version += 1
            self._skipped_in_a_row = 0
            return
        self.skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row == MAX_CONSECUTIVE_SKIPS:
            raise NoProgress(
                f"{MAX_CONSECUTIVE_SKIPS} steps in a row were skipped, the last because of {update.reason}; a lower "
                f"sft.learning_rate than {self.settings.learning_rate:g} may help; nothing was saved"
            )

    def save(self, path: str, metrics: dict[str, float] | None = None) -> None:
        """Write the model folder (weights, configuration, tokenizer, state.json) atomically. ``metrics``: of the model,
        for state.json. Raises StorageFailed."""
        state = CheckpointState(version=self.version, metrics=metrics or {})
        self._saver.save(SavedFolder(path=path, state=state))

    def _arrays(self, chosen: list[int]) -> SampleArrays:
        lengths_s = self._lengths_s[chosen]
        index_n = np.concatenate([np.arange(self._lengths_s[i]) + self._starts_s[i] for i in chosen])
        tokens = len(index_n)
        return SampleArrays(
            token_ids_n=self._token_ids_n[index_n].astype(np.int64),
            loss_mask_n=self._learned_n[index_n],
            behaviour_logprobs_n=np.zeros(tokens, np.float32),
            advantages_n=np.zeros(tokens, np.float32),
            versions_n=np.full(tokens, -1, np.int64),
            lengths_s=lengths_s,
            groups_s=np.arange(len(chosen)),
        )

    def _accumulate(self, arrays: SampleArrays) -> tuple[float, float]:
        """Accumulate gradients of the batch's mean cross-entropy over loss tokens; returns this rank's part of it, and
        the FLOP spent."""

        def undo() -> None:
            self.learner.clear_gradients()
            self._log.warning("%s", self._limit.halved)

        return self._limit.attempt(lambda: self._accumulate_once(arrays), undo)

    def _accumulate_once(self, arrays: SampleArrays) -> tuple[float, float]:
        mean_loss = flops = 0.0
        micro_batches = self._micro_batches(arrays)
        ranks = self.ranks
        slice_index = ranks.rank % ranks.context  # of each micro-batch's tokens, which have other dropout
        first_index = (ranks.data_rank + ranks.data_size * slice_index) * len(micro_batches)
        for micro_batch_index, batch in enumerate(micro_batches, first_index):
            self._set_dropout_key(f"{self.experiment.run.seed}/{self.version + self.skipped}/{micro_batch_index}")
            loss: Tensor = -self.learner.logprobs(batch, arrays, 1.0).logprobs_m.sum() / arrays.loss_tokens
            self.learner.backward(loss)
            mean_loss += float(loss.detach())
            flops += 0.0 if batch is EMPTY_MICRO_BATCH else self.learner.training_flops(batch)
        self._set_dropout_key(None)
        return mean_loss, flops

    def _micro_batches(self, arrays: SampleArrays) -> list[MicroBatchArrays]:
        """This rank's micro-batches, as many as every other rank has."""
        ranks, lengths = self.ranks, (arrays.lengths_s - 1).tolist()
        plan = pack(lengths, self._limit.size.tokens, ranks.data_size)[ranks.data_rank]
        return [slice_micro_batch(arrays, sequences) if sequences else EMPTY_MICRO_BATCH for sequences in plan]

    def _require_equal(self, call: str, **facts: int) -> None:
        tokens = {"tokens": len(self._token_ids_n), "loss tokens": int(self._learned_n.sum())}
        self.ranks.require_equal(call, {"version": self.version, **tokens, **facts})

    def _sum(self, *totals: float) -> list[float]:
        """Sum each of ``totals`` over the ranks, once where several compute the same sequences."""
        totals_tensor = torch.tensor(totals, dtype=torch.float64, device=self.learner.device)
        return self.ranks.sum_(totals_tensor * self.ranks.is_first).tolist()

    def _set_dropout_key(self, key: str | None) -> None:
        """Set the key of the adapter's dropout, if it has dropout; None: disable dropout."""
        if (lora := self.learner.lora) is not None and lora.dropout.rate:
            lora.dropout.key = key


def _endless_permutations(count: int, seed: int) -> Iterator[int]:
    """Yield every index once per epoch, endlessly; an epoch's order depends only on the seed and the epoch's number."""
    epoch = 0
    while True:
        yield from np.random.default_rng([seed, epoch]).permutation(count).tolist()
        epoch += 1
