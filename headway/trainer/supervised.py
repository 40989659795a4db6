"""Supervised fine-tuning: (prompt, solution) pairs, the loss on the solution only.

Legend: ``_n`` one value per token, ``_s`` one value per pair.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from headway.algorithms.packing import pack
from headway.algorithms.samples import SampleArrays, slice_micro_batch
from headway.config.load import validate_experiment
from headway.models.loading import DTYPES, weights_of
from headway.records.errors import ConfigurationError, NoProgress
from headway.records.generation import PublishedWeights
from headway.records.training import MOST_SKIPPED_IN_A_ROW
from headway.tokens.tokenizer import Tokenizer
from headway.trainer.checkpoints import CheckpointState
from headway.trainer.learner import Learner, OptimiserSettings, Update
from headway.trainer.ranks import Ranks
from headway.trainer.schedules import learning_rate
from headway.trainer.service import use_device, write_model_folder
from headway.weights.shared_memory import Publisher


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the data file; other keys are ignored."""

    prompt: str
    solution: str


@dataclass(frozen=True, kw_only=True)
class PairTokens:
    """One training sequence: prompt, solution, eos."""

    ids: list[int]
    prompt_tokens: int


def read_pairs(path: str | Path) -> list[Pair]:
    """Read the JSONL file. Raises ConfigurationError naming file and line."""
    file = Path(path)
    decoder = msgspec.json.Decoder(Pair)
    pairs: list[Pair] = []
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    pairs.append(_decode(decoder, line, file, number))
    except OSError as error:
        raise ConfigurationError(f"sft.data = {str(file)!r}: {error.strerror}") from None
    if not pairs:
        raise ConfigurationError(f"sft.data = {str(file)!r} has no pairs; one JSON object a line is needed")
    return pairs


def _decode(decoder: msgspec.json.Decoder[Pair], line: bytes, file: Path, number: int) -> Pair:
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file}:{number}: {error}; 'prompt' and 'solution' texts are needed") from None


class SupervisedService:
    """Worker class: the same model and optimiser as the RL trainer, next-token cross-entropy instead of rewards.

    Lifecycle: `prepare` once, then `steps` as often as wanted, `publish` and `save` in between and at the end.
    """

    def __init__(self, context: Any, *, experiment: dict[str, Any], run_id: str) -> None:
        self.experiment = validate_experiment(experiment, "experiment")
        self.settings = self.experiment.sft
        trainer = self.experiment.trainer
        self.tokenizer = Tokenizer.load(self.experiment.model.path)
        self.learner = Learner(
            self.experiment.model.path,
            dtype=trainer.dtype,
            device=use_device(context.device),
            ranks=Ranks(),
            gradient_checkpointing=trainer.gradient_checkpointing,
            settings=OptimiserSettings(
                beta1=trainer.beta1,
                beta2=trainer.beta2,
                epsilon=trainer.epsilon,
                weight_decay=self.settings.weight_decay,
                max_grad_norm=self.settings.max_grad_norm,
            ),
        )
        self.version = 0  # steps applied
        self.skipped = 0  # steps whose loss or gradient wasn't finite
        self._skipped_in_a_row = 0
        self._run_id = run_id
        self._publisher: Publisher | None = None
        self._sequences: list[PairTokens] = []
        self._order: Iterator[int] = iter(())

    def prepare(self) -> dict[str, float]:
        """Read, tokenise and filter the pairs.

        Returns kept, dropped_too_long, dropped_empty, too_long_share (of all pairs), longest (tokens, dropped ones
        included), mean (tokens of the kept). Raises ConfigurationError when none is left.
        """
        kept: list[PairTokens] = []
        too_long = empty = longest = 0
        for pair in read_pairs(self.settings.data):
            prompt = list(self.tokenizer.render(pair.prompt, self.experiment.model.template))
            solution = self.tokenizer.encode(pair.solution)
            if not prompt or not solution:
                empty += 1
                continue
            ids = [*prompt, *solution, self.tokenizer.eos_id]
            longest = max(longest, len(ids))
            if len(ids) > self.settings.max_tokens:
                too_long += 1
                continue
            kept.append(PairTokens(ids=ids, prompt_tokens=len(prompt)))
        if not kept:
            raise ConfigurationError(
                f"sft.data = {self.settings.data!r}: no pair is left ({too_long} longer than sft.max_tokens = "
                f"{self.settings.max_tokens}, {empty} with an empty prompt or solution)"
            )
        self._sequences = kept
        self._order = _shuffled_for_ever(len(kept), self.experiment.run.seed)
        return {
            "kept": len(kept),
            "dropped_too_long": too_long,
            "dropped_empty": empty,
            "too_long_share": too_long / (len(kept) + too_long + empty),
            "longest": longest,
            "mean": sum(len(sequence.ids) for sequence in kept) / len(kept),
        }

    def steps(self, count: int) -> dict[str, float]:
        """Take ``count`` optimiser steps.

        Returns version, the last step's loss, learning_rate and grad_norm, loss_mean over the steps, tokens,
        tokens_per_s, effective_token_share (tokens with loss ÷ tokens computed), flops, seconds, and, since the
        start, skipped steps and epochs. Raises NoProgress after MOST_SKIPPED_IN_A_ROW skipped steps.
        """
        if not self._sequences:
            raise ConfigurationError("prepare() must come before steps()")
        started = time.perf_counter()
        losses: list[float] = []
        tokens = loss_tokens = 0
        flops = norm = rate = 0.0
        for _ in range(count):
            rate = self._learning_rate()
            chosen = [self._sequences[next(self._order)] for _ in range(self.settings.batch_sequences)]
            arrays = _pair_arrays(chosen)
            loss, step_flops = self._accumulate(arrays)
            update = self.learner.update(rate, loss)
            self._count(update)
            norm = update.grad_norm
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
            "grad_norm": norm,
            "tokens": tokens,
            "tokens_per_s": tokens / max(seconds, 1e-9),
            "effective_token_share": loss_tokens / max(1, tokens),
            "flops": flops,
            "seconds": seconds,
            "skipped": self.skipped,
            "epochs": (self.version + self.skipped) * self.settings.batch_sequences / len(self._sequences),
        }

    def _count(self, update: Update) -> None:
        if update.applied:
            self.version += 1
            self._skipped_in_a_row = 0
            return
        self.skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row == MOST_SKIPPED_IN_A_ROW:
            raise NoProgress(
                f"{MOST_SKIPPED_IN_A_ROW} steps in a row were skipped, the last because of {update.reason}; a lower "
                f"sft.learning_rate than {self.settings.learning_rate:g} may help; nothing was saved"
            )

    def publish(self, version: int) -> PublishedWeights:
        """Publish the present weights under ``version``, in the generator's dtype."""
        if self._publisher is None:
            self._publisher = Publisher(self._run_id, dtype=DTYPES[self.experiment.generator.dtype])
        return self._publisher.publish(version, weights_of(self.learner.model))

    def save(self, path: str) -> None:
        """Write the model folder (weights, configuration, tokenizer, state.json) atomically. Raises StorageFailed."""
        state = CheckpointState(version=self.version)
        write_model_folder(path, self.learner.model, self.experiment.model.path, state)

    def load_weights(self, path: str) -> None:
        """Replace the weights by those of a model folder."""
        self.learner.load_weights(path)

    def measure_peak(self) -> float:
        """FLOP/s of large matrix products at the training dtype."""
        return self.learner.measure_peak()

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def _accumulate(self, arrays: SampleArrays) -> tuple[float, float]:
        """Gradients of the batch's mean cross-entropy over loss tokens; returns it and the FLOP spent."""
        total = flops = 0.0
        lengths = (arrays.lengths_s - 1).tolist()
        for chosen in pack(lengths, self.settings.micro_batch_tokens)[0]:
            batch = slice_micro_batch(arrays, chosen)
            logprobs_m, _ = self.learner.logprobs(batch, arrays, 1.0)
            loss: Tensor = -logprobs_m.sum() / arrays.loss_tokens
            loss.backward()
            total += float(loss.detach())
            flops += 3.0 * self.learner.flops(batch)
        return total, flops

    def _learning_rate(self) -> float:
        settings = self.settings
        return learning_rate(
            self.version,
            peak=settings.learning_rate,
            schedule=settings.schedule,
            warmup_steps=settings.warmup_steps,
            total_steps=settings.steps,
        )


def _pair_arrays(sequences: list[PairTokens]) -> SampleArrays:
    lengths_s = np.fromiter((len(s.ids) for s in sequences), np.int64, len(sequences))
    prompts_s = np.fromiter((s.prompt_tokens for s in sequences), np.int64, len(sequences))
    token_ids_n = np.concatenate([np.asarray(s.ids, np.int64) for s in sequences])
    starts_s = np.cumsum(lengths_s) - lengths_s
    tokens = int(lengths_s.sum())
    return SampleArrays(
        token_ids_n=token_ids_n,
        loss_mask_n=np.arange(tokens) >= np.repeat(starts_s + prompts_s, lengths_s),
        behaviour_logprobs_n=np.zeros(tokens, np.float32),
        advantages_n=np.zeros(tokens, np.float32),
        versions_n=np.full(tokens, -1, np.int64),
        lengths_s=lengths_s,
        groups_s=np.arange(len(sequences)),
    )


def _shuffled_for_ever(count: int, seed: int) -> Iterator[int]:
    """Every index once per epoch, each epoch in an order of its own that only the seed decides."""
    epoch = 0
    while True:
        yield from np.random.default_rng([seed, epoch]).permutation(count).tolist()
        epoch += 1
