"""The trainer's process, one per rank; `client.TrainerClient` makes the same calls on all ranks."""

from __future__ import annotations

import base64
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch

from headway.algorithms.samples import FlatBatch
from headway.config.load import model_folders, validate_experiment
from headway.config.schema import Experiment, TrainerConfig
from headway.config.services.policy_sections import PolicySections
from headway.models.adapter_targets import base_digest
from headway.models.cpu.native import missing_reason
from headway.models.hf.pixels import FOLDER, PixelStore
from headway.models.offload import OffloadedTensors
from headway.models.routing import replayed_routing
from headway.records.errors import CheckpointCorrupt, ConfigurationError, StepRefused
from headway.records.execution import MemoryMove
from headway.records.generation import POLICY_ADAPTER, PROBE_TOKENS, Probe, ProbeScores, PublishedWeights, probe_ids
from headway.records.tokens import TokenLogprobs
from headway.records.training import CheckpointInfo, OptimiserSettings, PartReport, StepReport
from headway.runtime.devices import native_kernels_enabled
from headway.runtime.nodes.handshake import software
from headway.tokens.grammar import GRAMMAR_VERSION
from headway.trainer.checkpoints import STATE_FILE, CheckpointState, verify
from headway.trainer.learner import Learner
from headway.trainer.micro_batch_limit import reporting_shortage
from headway.trainer.optimizer import learning_rate
from headway.trainer.peak_flops import measure_peak_flops
from headway.trainer.policy import PolicyGradient
from headway.trainer.publishing import WeightPublisher, publishes
from headway.trainer.ranks import Ranks
from headway.trainer.saving import FolderSaver, SavedFolder
from headway.trainer.state_files import StateFiles
from headway.trainer.step_statistics import Progress
from headway.trainer.token_recorder import TokenRecorder
from headway.weights.publication import Publication

MODEL_FOLDER = "model"  # of a checkpoint
ADAPTER_FOLDER = "adapter"  # in its place if an adapter is trained
GRAMMAR_FILE = "grammars.txt"  # GRAMMAR_VERSION of the library that reads the run's grammars, if it has any


class ModelService:
    """A model under training in a worker: its optimiser, its version, and the weights it publishes.

    ``context``: the worker's (device, log). ``settings``: of the forward pass and the optimiser.
    """

    exports_weights = False  # whether versions stay in this GPU's memory where every replica's GPU reads it

    def __init__(
        self,
        context: Any,
        experiment: PolicySections,
        run_id: str,
        settings: TrainerConfig,
        ranks: Ranks | None = None,
        *,
        replays: bool = False,
        pixels: PixelStore | None = None,
    ) -> None:
        """``replays``, ``pixels``: as of `Learner`."""
        self.experiment = experiment
        self._log = context.log
        self.ranks = ranks or Ranks()
        device, seed = use_device(context.device), experiment.run.seed
        if self.ranks.size > 1:
            self.ranks.require_equal("start", _installation(cast("Experiment", experiment)))
        learner_options: dict[str, Any] = {"chat": experiment.uses_chat, "replays": replays, "pixels": pixels}
        self.learner = Learner(experiment.model, settings, device, self.ranks, seed, **learner_options)
        self.version = 0  # completed steps
        self._saver = FolderSaver(self.learner)
        self._run_id = run_id
        run_folder = experiment.run.directory
        self._offloaded = OffloadedTensors(run_folder if Path(run_folder).is_dir() else None)
        self._publisher: WeightPublisher | None = None
        self._finisher = ThreadPoolExecutor(1, "publish")
        self._begun: tuple[int, Future[PublishedWeights | None]] | None = None  # the version of `begin_publish`

    def begin_publish(self, version: int) -> None:
        """Take a snapshot of the trained weights; the rest of publishing runs beside this process's next calls."""
        self._begun = version, self._finisher.submit(self._finish, self._begin(version))

    def publish(self, version: int) -> PublishedWeights | None:
        """Publish the trained weights under ``version``, in the generator's dtype; a call of all ranks, of which each
        writes what it has, and rank 0 reports them."""
        return self._finish(self._begin(version))

    def complete_publish(self, version: int) -> PublishedWeights | Future[PublishedWeights | None] | None:
        """Publish the weights of `begin_publish`, or the present ones if that wasn't called with ``version``."""
        if self._begun is None or self._begun[0] != version:
            return self.publish(version)
        (_, publish_future), self._begun = self._begun, None
        return publish_future

    @reporting_shortage()
    def _begin(self, version: int) -> Publication | None:
        if not publishes(self.learner):
            return None
        if self._begun is not None:  # two at a time would share their memory
            wait([self._begun[1]])
        if self._publisher is None:
            options: dict[str, Any] = {"exports": self.exports_weights}
            self._publisher = WeightPublisher(self.learner, self.experiment, self._run_id, **options)
        return self._publisher.begin(version)

    def _finish(self, publication: Publication | None) -> PublishedWeights | None:
        if publication is None:
            return None
        published = publication.finish()
        if self.ranks.rank > 0:
            return None
        return msgspec.structs.replace(published, adapter="" if self.learner.lora is None else POLICY_ADAPTER)

    def offload(self) -> MemoryMove:
        """Move weights, accumulated gradients and the optimiser's state off the device: from a GPU to pinned host
        memory, from a CPU to a file in the run's folder. Until `onload` nothing can be computed, published or saved.
        Raises StorageFailed before any change."""
        return self._offloaded.offload(self.learner.resident())

    def onload(self) -> MemoryMove:
        """Undo `offload`, bit for bit."""
        return self._offloaded.onload()

    def load_weights(self, path: str) -> None:
        """Replace only the weights (by a checkpoint's ``model`` folder, ``best``, any model or adapter folder)."""
        if (Path(path) / STATE_FILE).is_file():
            self._verify(path)
        self.learner.load_weights(path)

    def _verify(self, path: str) -> CheckpointState:
        """Check every file of a folder, of which each rank reads a share. Raises CheckpointCorrupt on all ranks."""
        try:
            outcome: CheckpointState | CheckpointCorrupt = verify(path, self.ranks.rank, self.ranks.size)
        except CheckpointCorrupt as error:
            outcome = error
        for failure in self.ranks.all_gather(outcome if isinstance(outcome, CheckpointCorrupt) else None):
            if failure is not None:
                raise failure
        assert isinstance(outcome, CheckpointState)
        return outcome

    def measure_peak(self) -> float:
        """Measure the FLOP/s of large matrix products at the training dtype."""
        return measure_peak_flops(self.learner.device, self.learner.dtype)

    def compare_with_one_rank(self) -> None:
        """Compare gradients of the ranks, if they divide a model, with those of one (see `layout_check`)."""
        if self.ranks.mesh is not None:
            from headway.trainer.layout_check import compare_with_one_rank  # makes models, as one rank never does

            self._log.warning("%s", compare_with_one_rank(cast("Experiment", self.experiment), self.learner))

    def close(self) -> None:
        """Unlink the published weights and leave the process group."""
        self._finisher.shutdown()
        self._saver.close()
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        self._offloaded.close()
        self.ranks.close()


class TrainerService(ModelService):
    """The worker class of an RL trainer's rank: the model, its optimiser and the version.

    Every rank gets its own sequences of a batch (`FlatBatch.take`) in the same calls.
    ``context``: the worker's (device, log). ``experiment``: the sections that it reads, or the
    validated experiment as a JSON mapping.
    """

    def __init__(
        self,
        context: Any,
        *,
        experiment: PolicySections | dict[str, Any],
        run_id: str,
        rank: int = 0,
        world_size: int = 1,
        rendezvous: str = "",
        exports_weights: bool = False,
    ) -> None:
        validated = validate_experiment(experiment, "experiment") if isinstance(experiment, dict) else experiment
        settings = validated.trainer
        ranks = open_ranks(settings, rank, world_size, rendezvous, use_device(context.device))
        replays, pixels = replayed_routing(validated) is not None, PixelStore(Path(validated.run.directory) / FOLDER)
        super().__init__(context, validated, run_id, settings, ranks, replays=replays, pixels=pixels)
        self.exports_weights = exports_weights
        uses_native = native_kernels_enabled() and settings.dtype == "float32" and torch.get_num_threads() == 1
        if uses_native and (reason := missing_reason(torch.float32, self.learner.device)):
            context.log.warning("training without the native kernels, which costs a tenth of the speed: %s", reason)
        if any(algorithm.kl_coefficient > 0 for algorithm in validated.rules.algorithms):
            decay = validated.algorithm.reference_decay
            self.learner.load_reference(validated.model.reference or validated.model.path, decay)
        torch.manual_seed(validated.run.seed)
        self.policy = PolicyGradient(self.learner, validated)
        self._recorder = TokenRecorder(validated.run.directory, validated.ledger, ranks)

    @reporting_shortage()
    def train_step(self, batch: FlatBatch) -> StepReport:
        """Train on one batch. Raises StepRefused if its step isn't the present version."""
        self._require_equal("train_step", batch)
        if batch.step != self.version:
            raise StepRefused(f"batch of step {batch.step} given to a trainer at version {self.version}")
        started = time.perf_counter()
        arrays, settings = batch.arrays(), self._settings()
        progress = self.policy.run(arrays, settings, batch.step)
        self._recorder.record(batch, arrays, progress)
        gathered = progress.gather(self.ranks)
        report = self._report(gathered, settings, started, samples=batch.samples, loss_tokens=batch.loss_tokens)
        return msgspec.structs.replace(report, sample_advantages=self.policy.sample_advantages(arrays, progress))

    def forward_backward(self, part: FlatBatch) -> PartReport:
        """Accumulate the gradients of a part of the next step (see `PolicyGradient.forward_backward`). Raises
        StepRefused if its step isn't the present version."""
        self._require_equal("forward_backward", part)
        if part.step != self.version:
            raise StepRefused(f"a part of step {part.step} given to a trainer at version {self.version}")
        arrays = part.arrays()
        accumulated, progress = self.policy.forward_backward(part, arrays)
        self._recorder.record(part, arrays, progress)
        return PartReport(
            samples=accumulated.samples,
            tokens=accumulated.progress.tokens,
            loss=accumulated.progress.loss,
            loss_tokens=accumulated.loss_tokens,
            compute_s=accumulated.compute_s,
            logprobs=TokenLogprobs(progress.logprobs_n.astype(np.float32)),  # of this rank's samples
            metrics=self.policy.metrics(accumulated.progress),
        )

    @reporting_shortage()
    def optim_step(self, settings: OptimiserSettings | None = None) -> StepReport:
        """Apply the gradients of all parts since the last step, which makes a version (see
        `PolicyGradient.optim_step`). ``settings``: by default the run's."""
        settings, parts = settings or self._settings(), tuple(self.policy.parts)
        self.ranks.require_equal("optim_step", {"step": self.version, "parts": len(parts), "settings": settings})
        started = time.perf_counter() - sum(part.compute_s for part in parts)
        progress = self.policy.optim_step(settings)
        samples, loss_tokens = sum(part.samples for part in parts), sum(part.loss_tokens for part in parts)
        return self._report(progress, settings, started, samples=samples, loss_tokens=loss_tokens)

    def score(self, prompt: tuple[int, ...] = (), pixels: str = "") -> ProbeScores:
        """Score random tokens, after a prompt with these pictures if there is one (see `Learner.score`)."""
        max_tokens = min(
            self.experiment.max_sequence_tokens - len(prompt),
            self.experiment.generator.kv_capacity_tokens or PROBE_TOKENS + 1,
        )
        model = self.learner.model
        drawn_v = np.delete(np.arange(model.config.vocabulary_size), model.placeholders)
        ids = drawn_v[list(probe_ids(self.version, len(drawn_v), max_tokens))].tolist()
        return self.learner.score(Probe(ids=tuple(ids), prompt=prompt, pixels=pixels))

    def _report(
        self, progress: Progress, settings: OptimiserSettings, started: float, *, samples: int, loss_tokens: int
    ) -> StepReport:
        """Increment the version after a step unless it was skipped, and report the step."""
        all_updates = progress.all_updates
        step, updates = self.version, sum(update.applied for update in all_updates)
        metrics = self.policy.metrics(progress)
        if updates:
            self.version += 1
            self.policy.adapt_kl(metrics.get("kl_reference"), samples)
        others = {"learning_rate": settings.learning_rate, "skipped_updates": float(len(all_updates) - updates)}
        return StepReport(
            step=step,
            version=self.version,
            skipped=not updates,
            reason="; ".join(filter(None, [update.reason for update in (*all_updates, *progress.value_updates)])),
            samples=samples,
            tokens=progress.tokens,
            computed_tokens=progress.computed_tokens,
            loss_tokens=loss_tokens,
            micro_batches=progress.micro_batches,
            compute_s=time.perf_counter() - started,
            flops=progress.flops,
            metrics=metrics | others,
            halved=self.policy.limit.halved,
            unrecorded=self._recorder.take_error(),
        )

    def close(self) -> None:
        self._recorder.close()
        super().close()

    def save_checkpoint(self, path: str, consumed: dict[int, list[int]]) -> CheckpointInfo:
        """Write atomically everything that a resume needs, then delete older checkpoints beyond ``keep_last``. Raises
        StorageFailed on a full disk of any rank; the older checkpoints are then kept."""
        self._saver.save(self._checkpoint(path, consumed))
        return CheckpointInfo(path=path, version=self.version)

    def begin_checkpoint(self, path: str, consumed: dict[int, list[int]], beside: bool = True) -> None:
        """Begin to write a checkpoint (see `FolderSaver`), which is the present state whatever is called meanwhile, if
        it is written ``beside`` that."""
        self._saver.begin(self._checkpoint(path, consumed), beside=beside)

    def checkpoint_written(self) -> Future[dict[str, str]]:
        """See `FolderSaver.written`."""
        return self._saver.written()

    def checkpoint_checksums(self) -> Future[dict[str, str]]:
        """See `FolderSaver.checksums`."""
        return self._saver.checksums()

    def commit_checkpoint(self, checksums: dict[str, str]) -> Future[int]:
        """See `FolderSaver.commit`."""
        return self._saver.commit(checksums)

    def discard_checkpoint(self) -> None:
        """See `FolderSaver.discard`."""
        self._saver.discard()

    def _checkpoint(self, path: str, consumed: dict[int, list[int]]) -> SavedFolder:
        adapts_kl = self.experiment.algorithm.kl_target is not None
        return SavedFolder(
            path=path,
            state=self._state(consumed, {"kl_coefficient": self.policy.rules[0].kl_coefficient} if adapts_kl else {}),
            weights_folder=self._weights_folder,
            texts={GRAMMAR_FILE: GRAMMAR_VERSION} if self.experiment.constrains else {},
            has_optimiser=True,
            kept_checkpoints=self.experiment.checkpoint.keep_last,
        )

    def save_weights(self, path: str, metrics: dict[str, float] | None = None) -> CheckpointInfo:
        """Write the present weights as a model folder with ``state.json`` (``RUN/best``), atomically."""
        with closing(FolderSaver(self.learner)) as saver:  # a checkpoint may be on its way
            saver.save(SavedFolder(path=path, state=self._state({}, metrics or {})))
        return CheckpointInfo(path=path, version=self.version)

    def load_checkpoint(self, path: str) -> int:
        """Load a checkpoint; returns its version. Raises CheckpointCorrupt before any change, and ConfigurationError if
        another library would read the run's grammars."""
        state = self._verify(path)
        grammar_file = Path(path) / GRAMMAR_FILE
        if grammar_file.is_file() and (stored := grammar_file.read_text()) != GRAMMAR_VERSION:
            raise ConfigurationError(
                f"{path} is of a run whose constrained answers were sampled with {stored}; {GRAMMAR_VERSION}, which is "
                "installed, may read their grammars otherwise: install that version"
            )
        state_files = StateFiles(path)
        if not (folder := Path(path) / self._weights_folder).is_dir():
            other_kind = "a whole model" if self.learner.lora is not None else "an adapter"
            raise ConfigurationError(f"{path} is a checkpoint of a run that trained {other_kind}: there is no {folder}")
        self.learner.load_weights(folder)
        self.policy.clear()
        self.learner.optimiser.state = self.learner.read_optimiser(state_files)
        if self.policy.critic is not None:
            self.policy.critic.restored()
        rng_state = np.frombuffer(base64.b64decode(state.random_state), np.uint8)
        torch.set_rng_state(torch.from_numpy(rng_state.copy()))
        self.policy.rules[0].kl_coefficient = state.metrics.get(
            "kl_coefficient", self.experiment.algorithm.kl_coefficient
        )
        self.version = state.version
        return self.version

    def _require_equal(self, call: str, batch: FlatBatch) -> None:
        facts: dict[str, Any] = {"version": self.version, "step": batch.step, "groups": len(batch.batch_groups)}
        facts |= {"samples": batch.samples, "tokens": batch.tokens, "loss tokens": batch.loss_tokens}
        self.ranks.require_equal(call, facts)

    @property
    def _weights_folder(self) -> str:
        return MODEL_FOLDER if self.learner.lora is None else ADAPTER_FOLDER

    def _settings(self) -> OptimiserSettings:
        return self.learner.optimiser_settings(self._learning_rate())

    def _learning_rate(self) -> float:
        settings = self.experiment.trainer
        first_step, last_step = settings.decay_steps(self.experiment.run.steps)
        return learning_rate(self.version, settings, last_step, first_step, lowest=settings.min_learning_rate)

    def _state(self, consumed: dict[int, list[int]], metrics: dict[str, float]) -> CheckpointState:
        settings = self.experiment.trainer
        return CheckpointState(
            version=self.version,
            consumed=consumed,
            random_state=base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
            schedule={"schedule": settings.schedule, "step": self.version, "learning_rate": self._learning_rate()},
            metrics=metrics,
        )


def _installation(experiment: Experiment) -> dict[str, str]:
    """Versions of libraries and digests of model folders, which must be the same on the machines of all ranks."""
    facts = {package: f"{package} {release}" for package, release in software().items()}
    for package in ("transformers", "peft"):
        with suppress(PackageNotFoundError):
            facts[package] = version(package)
    return facts | {key: base_digest(folder) for key, folder in model_folders(experiment).items()}


def open_ranks(settings: TrainerConfig, rank: int, size: int, rendezvous: str, device: torch.device) -> Ranks:
    """A rank of the mesh that ``settings`` ask for; blocks until all ``size`` ranks are there."""
    layout, meshed = settings.layout_of(size), settings.host_memory == "all"
    return Ranks(rank, size, rendezvous, device, *layout, meshed=meshed)


def use_device(device: Any) -> torch.device:
    """Return the torch device of the worker, and set the number of compute threads to its cores."""
    if device.threads is not None:
        torch.set_num_threads(device.threads)
    return torch.device(device.torch_device())
