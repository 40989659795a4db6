"""The learner of a policy in simulators: Adam steps on the fragments of one round at a time.

Shapes: t steps of a fragment, b lanes, n transitions of a step, m those of a minibatch, p all parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from headway.config.simulation import EmbodiedAlgorithmConfig, SimulatorExperiment
from headway.embodied.objective import LossTerms, MinibatchLoss, joined, loss_terms, minibatch_loss, ratio_changes
from headway.embodied.policies import CLIP, ActorCritic, normalised
from headway.embodied.records import Array, Box, Fragment, PolicyWeights, Spaces
from headway.embodied.statistics import RunningStatistics
from headway.records.errors import CheckpointCorrupt
from headway.records.training import SKIPPED_MINIBATCHES, OptimiserSettings
from headway.runtime.devices import parse_device
from headway.trainer.optimizer import AdamW, learning_rate

_FILE = "learner.safetensors"
_SHUFFLES = 1 << 63  # second half of their keys: those of blocks' noise are block numbers
_BETA2, _EPSILON = 0.999, 1e-5  # Adam's in PPO's published code


class _Batch(NamedTuple):
    """Transitions: block after block, step by step, or those of a minibatch."""

    inputs_n: Tensor  # observations as `ActorCritic.forward` takes them
    actions_n: Tensor
    terms: LossTerms

    def rows(self, idx_m: Array | slice) -> _Batch:
        """Return those of the indices ``idx_m``."""
        idx = idx_m if isinstance(idx_m, slice) else torch.from_numpy(idx_m).to(self.inputs_n.device)
        return _Batch(self.inputs_n[idx], self.actions_n[idx], self.terms.rows(idx_m))


class _Update(NamedTuple):
    """An optimiser step that was taken, or skipped."""

    loss: MinibatchLoss
    entropy: float
    grad_norm: float  # before it is cut; not finite: the step was skipped


class FragmentLearner:
    """Parameters, optimiser and statistics of the policy, of which each `step` makes a version.

    Lifecycle: built, with weights from the run's seed -> ``step`` any number of times. ``state`` and ``load``, or
    ``write`` and ``read`` as a file, bring another one to the same bits.

    A step whose gradients are never finite changes nothing and makes no version."""

    def __init__(self, experiment: SimulatorExperiment, spaces: Spaces, device: str) -> None:
        """``device``: as a plan names it. Raises ConfigurationError for squashed actions without bounds."""
        self._algorithm, self._trainer = experiment.algorithm, experiment.trainer
        self._seed, self._total_steps = experiment.run.seed, experiment.run.steps
        parsed = parse_device(str(device))
        if parsed.threads is not None:
            torch.set_num_threads(parsed.threads)
        self._device, self._spaces = torch.device(parsed.torch_device()), spaces
        self._network = ActorCritic(spaces, experiment.policy, torch, self._tensor)
        self._normalises = experiment.policy.normalize
        self._normalises_observations = self._normalises and not self._network.reads_pictures
        sizes = [math.prod(shape) for shape in self._network.shapes.values()]
        self._parameters_p = torch.zeros(sum(sizes), device=self._device)
        self._parameters = {
            name: view.detach().requires_grad_() for name, view in self._network.views(self._parameters_p).items()
        }
        self._initialise()
        self._optimiser = AdamW([self._parameters_p])
        self._moments = self._optimiser.zero_state(self._parameters_p)
        self._optimiser.state[self._parameters_p] = self._moments
        self._statistics = RunningStatistics.start(spaces.observations.shape if self._normalises_observations else ())
        self.version = 0

    @torch.no_grad()
    def _initialise(self) -> None:
        """Orthogonal weights, the actor's last layer near 0 (as stable-baselines3 has them)."""
        generator = torch.Generator().manual_seed(self._seed)
        for name, view in self._parameters.items():
            if name.endswith("_bias") or name == "log_deviations":
                continue
            gain = {"actor": 0.01, "critic": 1.0}.get(name, math.sqrt(2.0))
            for matrix in view if name.startswith("hidden") else [view]:
                matrix.copy_(torch.nn.init.orthogonal_(torch.empty(matrix.shape), gain, generator=generator))

    def step(self, fragments: Sequence[Fragment]) -> dict[str, float]:
        """Train on a fragment of each block, by block number; returns the step's metrics."""
        statistics, scale = self._statistics, 1.0
        if self._normalises:
            statistics = statistics.with_returns_of(fragments, self._algorithm.discount)
            scale = float(statistics.returns.deviation)
        batch = self._batch(fragments, scale)
        rate = learning_rate(self.version, self._trainer, self._total_steps)
        updates, skipped_minibatches = self._train(batch, rate)
        applied = [update for update in updates if math.isfinite(update.grad_norm)]
        if applied:
            self.version += 1
            if self._normalises_observations:
                statistics = statistics.with_observations_of(fragments)
            self._statistics = statistics
        return {
            **_metrics(batch.terms, applied, self._algorithm),
            "learning_rate": rate,
            "reward_scale": scale,
            "skipped_updates": float(len(updates) - len(applied)),
            SKIPPED_MINIBATCHES: float(skipped_minibatches),
        }

    def weights(self) -> PolicyWeights:
        """A copy of the present weights, with their version."""
        observations = self._statistics.observations
        parameters_p = self._parameters_p.cpu().numpy().copy()
        return PolicyWeights(self.version, parameters_p, observations.mean, observations.deviation)

    def state(self) -> dict[str, Array]:
        """Copies of all that a step reads and changes, by name."""
        arrays = {f"optimiser.{name}": tensor.cpu().numpy().copy() for name, tensor in self._moments.items()}
        arrays["parameters"] = self._parameters_p.cpu().numpy().copy()
        return arrays | self._statistics.state() | {"version": np.array(self.version)}

    def load(self, arrays: Mapping[str, Array]) -> None:
        """Restore a `state`. Raises RuntimeError for that of another policy."""
        tensors = {f"optimiser.{name}": tensor for name, tensor in self._moments.items()}
        for name, tensor in {"parameters": self._parameters_p, **tensors}.items():
            tensor.copy_(torch.from_numpy(arrays[name].copy()))
        self._statistics, self.version = RunningStatistics.restored(arrays), int(arrays["version"])

    def write(self, folder: Path) -> None:
        """Write the state into ``folder``, as a file that is there only when it is whole. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.state(), folder / "unfinished")
        (folder / "unfinished").rename(folder / _FILE)

    def read(self, folder: Path) -> None:
        """Restore what ``write`` wrote. Raises CheckpointCorrupt for a file that is missing, damaged or of another
        policy."""
        file = folder / _FILE
        try:
            self.load(load_file(file))
        except (OSError, SafetensorError, KeyError, RuntimeError) as error:
            raise CheckpointCorrupt(f"{file}: {error}") from error

    def close(self) -> None:
        """Do nothing: it has nothing outside of its process."""

    def _batch(self, fragments: Sequence[Fragment], scale: float) -> _Batch:
        """The counted transitions of fragments. ``scale``: what their rewards are divided by."""
        space, rewards = self._spaces.actions, [fragment.rewards_tb for fragment in fragments]
        if self._normalises:
            rewards = [(rewards_tb / scale).clip(-CLIP, CLIP) for rewards_tb in rewards]
        action_shape = (math.prod(space.shape),) if isinstance(space, Box) else ()
        inputs_n = self._inputs(joined(fragment.observations_tb for fragment in fragments))
        actions_n = self._tensor(joined(fragment.actions_tb for fragment in fragments).reshape(-1, *action_shape))
        evaluated = None if self._algorithm.correction == "none" else self._evaluated(inputs_n, actions_n)
        ends = [end for fragment in fragments for end in (fragment.last_observations_b, fragment.final_observations_n)]
        _, end_values = self._evaluated(self._inputs(np.concatenate(ends)), None)
        terms = loss_terms(fragments, rewards, evaluated, end_values, self._algorithm)
        counted_n = np.flatnonzero(joined(fragment.counted_tb for fragment in fragments))
        return _Batch(inputs_n, actions_n, terms).rows(counted_n)

    def _inputs(self, observations_n: Array) -> Tensor:
        if self._network.reads_pictures:
            return self._tensor(observations_n)
        if self._normalises_observations:
            moments = self._statistics.observations
            observations_n = normalised(observations_n, moments.mean, moments.deviation)
        return self._tensor(observations_n.reshape(len(observations_n), -1).astype(np.float32))

    def _tensor(self, array: Array) -> Tensor:
        return torch.as_tensor(array, device=self._device)

    @torch.no_grad()
    def _evaluated(self, inputs_n: Tensor, actions_n: Tensor | None) -> tuple[Array, Array]:
        """Log-probabilities of actions, if there are any, and values under the present policy."""
        logprobs, values = [torch.zeros(0)], []
        for first in range(0, len(inputs_n), self._trainer.minibatch):
            idx_m = slice(first, first + self._trainer.minibatch)
            outputs_m, values_m = self._network.forward(self._parameters, inputs_n[idx_m])
            values.append(values_m.cpu())
            if actions_n is not None:
                logprobs.append(self._scores(outputs_m, actions_n[idx_m])[0].cpu())
        return torch.cat(logprobs).numpy(), torch.cat(values).numpy()

    def _scores(self, outputs_m: Tensor, actions_m: Tensor) -> tuple[Tensor, Tensor]:
        return self._network.distribution.scores(outputs_m, self._parameters["log_deviations"], actions_m)

    def _train(self, batch: _Batch, rate: float) -> tuple[list[_Update], int]:
        """Take the optimiser steps of all passes; returns them, and the number of minibatches that an early stop left
        out. The order of a pass follows from (seed, version, pass)."""
        count, updates = len(batch.inputs_n), list[_Update]()
        size, passes, limit = self._trainer.minibatch, self._trainer.passes, self._trainer.max_grad_norm
        settings = OptimiserSettings(learning_rate=rate, beta2=_BETA2, epsilon=_EPSILON, max_grad_norm=limit)
        for number in range(passes):
            key = np.array([self._seed % 2**64, _SHUFFLES + self.version], np.uint64)  # a list would become floats
            generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, number]))
            shuffled = batch.rows(generator.permutation(count))
            for first in range(0, count, size):
                update = self._update(shuffled.rows(slice(first, first + size)), settings, may_stop=bool(updates))
                if update is None:
                    return updates, passes * -(-count // size) - len(updates)
                updates.append(update)
        return updates, 0

    def _update(self, batch: _Batch, settings: OptimiserSettings, *, may_stop: bool) -> _Update | None:
        """Take an optimiser step on a minibatch; None: its ratios are beyond the limits of an early stop."""
        outputs_m, values_m = self._network.forward(self._parameters, batch.inputs_n)
        logprobs_m, entropy = self._scores(outputs_m, batch.actions_n)
        scores_m, estimates_m = logprobs_m.detach().cpu().numpy(), values_m.detach().cpu().numpy()
        loss = minibatch_loss(scores_m, estimates_m, batch.terms, self._algorithm)
        limits = self._algorithm.early_stop_kl, self._algorithm.early_stop_ratio
        if may_stop and limits != (None, None):
            changes = zip(ratio_changes(loss.log_ratios_m), limits, strict=True)
            if any(limit is not None and change > limit for change, limit in changes):
                return None
        outputs, slopes = [logprobs_m, values_m], [self._tensor(loss.by_logprobs_m), self._tensor(loss.by_values_m)]
        if coefficient := self._algorithm.entropy_coefficient:
            outputs.append(entropy)
            slopes.append(torch.full_like(entropy, -coefficient))
        leaves = [leaf for leaf in self._parameters.values() if leaf.numel()]
        gradients = torch.autograd.grad(outputs, leaves, slopes)
        gradient_p = torch.cat([gradient.reshape(-1) for gradient in gradients])
        grad_norm = float(torch.linalg.vector_norm(gradient_p))
        if math.isfinite(grad_norm):
            self._parameters_p.grad = gradient_p.mul_(min(1.0, settings.max_grad_norm / (grad_norm + 1e-6)))
            self._optimiser.step(settings)
        return _Update(loss, float(entropy.detach()), grad_norm)


def _metrics(terms: LossTerms, updates: Sequence[_Update], algorithm: EmbodiedAlgorithmConfig) -> dict[str, float]:
    """Means over the optimiser steps that were taken; quantiles of ratios over those of the last pass."""
    targets_n, errors_n = terms.targets_n, terms.targets_n - terms.start_values_n
    metrics = {
        "behaviour_weight_mean": float(terms.weights_n.mean()),
        "behaviour_weight_max": float(terms.weights_n.max()),
        "explained_variance": 1.0 - float(errors_n.var()) / (float(targets_n.var()) or 1.0),
    }
    if not updates:
        return metrics
    log_ratios_n = np.concatenate([update.loss.log_ratios_m for update in updates])
    metrics["clip_fraction"] = float(np.concatenate([update.loss.clipped_m for update in updates]).mean())
    metrics["kl"], metrics["ratio_deviation"] = ratio_changes(log_ratios_n)
    numbers = [(each.loss.policy_loss, each.loss.value_loss, each.entropy, each.grad_norm) for each in updates]
    policy, value, entropy, grad_norm = np.mean(numbers, axis=0).tolist()
    metrics |= {"policy_loss": policy, "value_loss": value, "entropy": entropy, "grad_norm": grad_norm}
    metrics["loss"] = policy + algorithm.value_coefficient * value - algorithm.entropy_coefficient * entropy
    quantiles = np.exp(np.quantile(log_ratios_n[-len(targets_n) :], (0.01, 0.5, 0.99, 1.0))).tolist()
    return metrics | dict(zip(("ratio_p01", "ratio_p50", "ratio_p99", "ratio_max"), quantiles, strict=True))
