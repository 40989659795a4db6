"""The model under training, shared by RL and SFT: its log-probabilities, its optimiser and the guarded update.

Legend: ``_n`` one value per packed token, ``_m`` per token that carries loss, ``d`` width, ``v`` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from headway.algorithms.samples import IntArray, MicroBatchArrays, SampleArrays
from headway.config.model import ModelConfig
from headway.config.schema import TrainerConfig
from headway.models.cpu import native
from headway.models.decoder import Decoder
from headway.models.experts import ExpertReplay
from headway.models.hf.pixels import Pixels, PixelStore
from headway.models.hidden_states import HiddenStates, chosen_logprobs
from headway.models.loading import DTYPES, copy_weights, weights_of
from headway.models.packed_model import PackedModel
from headway.models.run_model import (
    folder_rows,
    load_into,
    open_base,
    open_model,
    open_on_meta,
    open_policy_adapter,
    read_weights,
    save_policy,
    without_adapter,
)
from headway.models.shards.row_map import FileTensor
from headway.models.shards.shard import Shard, shards_of
from headway.records.errors import ConfigurationError, ExpertsMismatch
from headway.records.generation import PathScores, Probe, ProbeScores
from headway.records.tokens import EXPERTS, KEPT, ExpertRouting, pixels_of
from headway.records.training import OptimiserSettings
from headway.runtime.devices import native_kernels_enabled
from headway.tokens.grammar import Grammars
from headway.tokens.tokenizer import Tokenizer
from headway.trainer.kept_sets import KeptSets, MicroBatchSets
from headway.trainer.master_weights import MasterWeights, MovingAverage
from headway.trainer.optimizer import OptimiserState, open_optimiser
from headway.trainer.ranks import Ranks
from headway.trainer.sharding import ShardedModel, is_divided, own_rows_of
from headway.trainer.state_files import ATTACHED, AttachedState, StateFiles
from headway.trainer.streams.divergence import Divergence
from headway.trainer.streams.teachers import TaughtTokens, divergence_of
from headway.trainer.streams.token_logprobs import token_logprobs


@dataclass(frozen=True, kw_only=True)
class Update:
    """The result of one optimiser step. If not ``applied``, weights and optimiser state are unchanged."""

    applied: bool
    reason: str  # the reason why it was skipped; "": it was applied
    grad_norm: float  # before clipping


class TokenScores(NamedTuple):
    """The scores of the tokens that carry loss, from a forward pass."""

    logprobs_m: Tensor  # log-softmax(z/T) of each, with gradient
    entropies_m: Tensor  # of softmax(z/T), with gradient
    kept: MicroBatchSets | None  # the sets over which these are normalised; None: all are the complete vocabulary
    expert_counts: tuple[int, int, int]  # `ExpertReplay.counts`, summed over all layers
    divergence: Divergence | None = None  # from the teacher; None: no rule has one
    hidden_md: Tensor | None = None  # that predict them, without gradient; None: not asked for


class Learner:
    """Float32 master weights, their optimiser and the forward pass in the chosen dtype.

    In bfloat16 the model computes with its masters rounded once a step, as an engine does, and so is its residual
    stream; sums of norms, softmax and losses, accumulated gradients, their norm and the optimiser are float32. With an
    adapter only its weights are trained, published and saved; the model's weights don't change, and have no masters.
    """

    def __init__(
        self,
        chosen: ModelConfig,
        settings: TrainerConfig,
        device: torch.device,
        ranks: Ranks,
        seed: int = 0,
        *,
        chat: bool = False,
        replays: bool = False,
        pixels: PixelStore | None = None,
    ) -> None:
        """``seed``: of a new adapter's weights. ``chat``: as in `Tokenizer.load`. ``replays``: the model in training
        chooses the batch's recorded experts. ``pixels``: of the run's folder, if batches may have pictures."""
        self._chosen, self._folder, self._chat = chosen, chosen.path, chat
        self.dtype = DTYPES[settings.dtype]
        self._replays, self.pixels = replays, pixels
        self._sets: KeptSets | None = None  # of the last batch
        self.device = device
        self.ranks = ranks
        self.settings = settings
        uses_native = native_kernels_enabled() and self.dtype == torch.float32
        self._kernels = native.kernels_for(self.dtype, device) if uses_native else None
        self._sharded: list[ShardedModel] = []  # the model in training, and its reference
        is_sharded, is_adapted = ranks.mesh is not None, chosen.adapter is not None
        opened_dtype = torch.float32 if is_sharded and not is_adapted else self.dtype  # masters are what is divided
        if is_sharded:
            self.model = self._open_divided(chosen.path, opened_dtype, frozen=is_adapted)
        else:
            self.model = open_base(chosen, opened_dtype, device)
        self.lora = None if chosen.adapter is None else open_policy_adapter(self.model, chosen, device, seed)
        self.model.checkpointing = settings.gradient_checkpointing
        self.reference: PackedModel | None = None
        self.frozen: list[PackedModel] = []  # the reference, and teachers
        self.average: MovingAverage | None = None  # of the weights, with which the reference computes
        self.attached: AttachedState | None = None
        self._trains_rows = is_sharded and not is_adapted  # an adapter's matrices are complete on every rank
        self.masters = self._open_masters()
        self.parameters = list(self.masters.trained().values())
        self.optimiser = open_optimiser(settings, self.model, self.masters.trained())

    def _open_divided(self, path: str | Path, dtype: torch.dtype, *, frozen: bool) -> PackedModel:
        """Load this rank's rows of the model in folder ``path``, and divide its computation."""
        model, fill = open_on_meta(self._chosen, dtype, path)
        division, is_decoder = self.ranks.division(), isinstance(model, Decoder)
        if is_decoder:  # its experts are divided twice, first here
            model.divide(division)
        if frozen:
            model.requires_grad_(False)
        in_host_memory = self.settings.host_memory == "all"
        sharded = ShardedModel(model, self.ranks, self.dtype, self.device, fill, in_host_memory=in_host_memory)
        if not is_decoder:  # what it can do shows once it has weights
            model.divide(division)
        self._sharded.append(sharded)
        return model

    def _open_masters(self) -> MasterWeights:
        if self.lora is not None:
            return MasterWeights(self.lora.parameters, self.dtype)
        parameters, exact = dict(self.model.named_parameters()), None
        if self.dtype != torch.float32 and not self._sharded:
            exact = weights_of(open_model(self._chosen, torch.float32, self.device))
        masters = MasterWeights(parameters, self.dtype, exact)
        masters.sum_in_float32(self.model.config.vocabulary_size)
        return masters

    def weights(self) -> dict[str, Tensor]:
        """The published weights, of the model or its adapter, by name and without copying: as the model computes with
        them, in its dtype; if ranks divide them, this rank's rows of their float32 masters."""
        return weights_of(self.model) if self.lora is None else self.lora.weights()

    @property
    def shares_prefixes(self) -> bool:
        """Whether samples may share a prefix in a micro-batch, which all models that compute it must support."""
        return all(model.shares_prefixes for model in (self.model, *self.frozen))

    def load_reference(self, model_path: str | Path, decay: float | None = None) -> None:
        """Load the reference model of a KL penalty (see `open_frozen`). With ``decay`` it begins as the trained model
        and is a moving average of its weights. Raises ConfigurationError if its vocabulary size differs."""
        self.reference = self.open_frozen(model_path, averages=decay is not None)
        our_size, other_size = self.model.config.vocabulary_size, self.reference.config.vocabulary_size
        if our_size != other_size:
            raise ConfigurationError(
                f"model.reference = {str(model_path)!r} has a vocabulary of {other_size}, the model one of {our_size}: "
                "they must be equal"
            )
        if decay is not None:
            self.average = MovingAverage(self.reference, self.masters.tensors, self.dtype, decay)

    def open_frozen(self, model_path: str | Path, *, averages: bool = False) -> PackedModel:
        """Load a model that isn't trained, in the forward pass's dtype. With an adapter and the model's folder as
        ``model_path`` it is the model without its adapter. ``averages``: rows that ranks divide are float32."""
        if self.lora is not None and Path(model_path) == Path(self._folder):
            model = without_adapter(self.model, self.lora)
        elif self.ranks.mesh is None:
            model = open_model(self._chosen, self.dtype, self.device, model_path).requires_grad_(False)
        else:
            model = self._open_divided(model_path, torch.float32 if averages else self.dtype, frozen=True)
        self.frozen.append(model)
        return model

    def release_frozen(self) -> None:
        """Free the heads that `hidden_states` has gathered."""
        for sharded in self._sharded:
            if any(model is sharded.model for model in self.frozen):
                sharded.release()

    def hidden_states(
        self, model: PackedModel, batch: MicroBatchArrays, predictors: IntArray, *, trains: bool = False
    ) -> Tensor:
        """Hidden states [J, d] of the micro-batch's rows ``predictors``, without gradient unless ``trains``. The model
        in training replays experts as in `logprobs`. If ranks divide ``model``, its head stays complete until
        `release_frozen` or the backward."""
        (forward, _), context = self._forward(model, batch), model.division.context

        @torch.set_grad_enabled(trains)
        def compute() -> Tensor:
            hidden_nd = forward()
            if context is None:
                return hidden_nd.index_select(0, self._tensor(predictors))
            share = context.share(predictors, len(batch.input_ids), self.device)
            return share.gather(hidden_nd.index_select(0, share.rows))

        with native.using(self._kernels):
            return model.compute(compute)

    def _forward(self, model: PackedModel, batch: MicroBatchArrays) -> tuple[Callable[[], Tensor], ExpertReplay | None]:
        """The function that computes this rank's hidden states of a micro-batch, inside `PackedModel.compute`, and the
        recorded experts that the model in training replays in it."""
        inputs: list[Any] = [self._ids(batch.input_ids, model), batch.input_lengths, batch.continues]
        replay = self._replay(batch) if model is self.model else None
        pictures = self._pictures(batch)  # of a transformers model: only these get pictures
        further: list[Any] = [pictures] if pictures else [] if replay is None else [replay]
        return partial(model.forward_packed, *inputs, *further), replay

    def logprobs(
        self,
        batch: MicroBatchArrays,
        arrays: SampleArrays,
        temperature: float,
        model: PackedModel | None = None,
        taught: Sequence[TaughtTokens] = (),
        *,
        keeps_hidden: bool = False,
    ) -> TokenScores:
        """Score the tokens that carry loss under ``model`` (default: the model in training, whose routers choose the
        batch's recorded experts if it replays them), over the kept sets of these tokens, if the batch has them.
        ``keeps_hidden``: return their hidden states too. Raises ExpertsMismatch for experts of another model,
        KeptSetMismatch for sets without their tokens."""
        chosen_model, expert_counts = model or self.model, (0, 0, 0)
        forward, replay = self._forward(chosen_model, batch)
        predictors_m = self._tensor(batch.predictors_m)
        targets_m = self._ids(arrays.token_ids_n[batch.targets_m], chosen_model)
        kept = own_kept = self._kept(batch.targets_m, arrays)
        share, context = None, chosen_model.division.context
        if context is not None:  # each rank scores the loss tokens that its slice predicts
            share = context.share(batch.predictors_m, len(batch.input_ids), self.device)
            predictors_m, targets_m = share.rows, targets_m[share.own]
            own_kept = None if kept is None else self._kept(batch.targets_m[share.own.cpu().numpy()], arrays)

        def kept_of(positions: IntArray) -> MicroBatchSets | None:
            return self._kept(batch.targets_m[positions], arrays)

        def compute() -> list[Tensor]:
            hidden_md = forward().index_select(0, predictors_m)
            own_scores = list(token_logprobs(chosen_model, hidden_md, targets_m, temperature, kept=own_kept))
            if taught:
                own_m = np.arange(len(batch.targets_m)) if share is None else share.own.cpu().numpy()
                own_scores += divergence_of(taught, chosen_model, hidden_md, own_m, temperature, kept_of)
            own_scores += [hidden_md.detach()] if keeps_hidden else []
            return own_scores if share is None else [share.gather(scores) for scores in own_scores]

        with native.using(self._kernels):
            logprobs_m, entropies_m, *others = chosen_model.compute(compute)
        if share is not None and kept is not None:
            own_masses_m = kept.masses_m[share.own] if own_kept is None else own_kept.masses_m
            kept.masses_m.copy_(share.gather(own_masses_m))
        if replay is not None:
            counts = replay.counts.sum(0)
            expert_counts = (counts if share is None else self.ranks.sum_(counts, "context")).tolist()
        counts_of_experts = cast("tuple[int, int, int]", tuple(expert_counts))
        hidden_md = others.pop() if keeps_hidden else None
        compared = Divergence(*others) if others else None
        return TokenScores(logprobs_m, entropies_m, kept, counts_of_experts, compared, hidden_md)

    @torch.no_grad()
    def score(self, probe: Probe) -> ProbeScores:
        """Score a probe as training computes it, alone and packed between two other documents, the second of which has
        the same pictures. Raises BufferCorrupt as `logprobs` does."""
        ids, cut, scores_by_path = probe.prompt + probe.ids, len(probe.ids) // 3, dict[str, PathScores]()
        pixels, forward = self._read([probe.pixels]), cast("Any", self.model.forward_packed)  # some take pictures
        for path, prefix, suffix in (("alone", (), ()), ("packed", probe.ids[:cut], probe.prompt + probe.ids[cut:])):
            lengths = [len(part) for part in (prefix, ids, suffix) if part]
            pictures = [{} if part is prefix else pixels[0] for part in (prefix, ids, suffix) if part and pixels]
            packed_n, recorder = torch.tensor([*prefix, *ids, *suffix], device=self.device), HiddenStates()
            inputs = packed_n, lengths, *([None, pictures] if pictures else [])
            scored_slice = slice(len(prefix) + max(0, len(probe.prompt) - 1), len(prefix) + len(ids))
            with native.using(self._kernels), recorder.recording(self.model.layers):
                logits_nv = self.model.compute(partial(self._logits, forward, inputs, scored_slice))
            if (context := self.model.division.context) is not None:
                share = context.share(np.arange(len(packed_n)), len(packed_n), self.device)
                recorder.convert(lambda own_np, share=share: share.gather(own_np.to(self.device)).cpu())
            if len(lengths) == 1 or (self.model.packs and not pixels):
                scores_by_path[path] = recorder.scores(logits_nv, ids, len(prefix))
            else:  # the documents were rows of a batch in another order
                scores_by_path[path] = PathScores(logprobs=chosen_logprobs(logits_nv, ids))
        has_experts = self.model.config.has_experts
        return ProbeScores(probe=probe, precision=self.settings.dtype, mixture=has_experts, paths=scores_by_path)

    def _logits(self, forward: Callable[..., Tensor], inputs: tuple[Any, ...], scored_slice: slice) -> Tensor:
        hidden_nd, context = forward(*inputs), self.model.division.context
        if context is None:
            return self.model.head(hidden_nd[scored_slice])
        rows = np.arange(len(inputs[0]))[scored_slice]
        share = context.share(rows, len(inputs[0]), self.device)
        return share.gather(self.model.head(hidden_nd[share.rows]))

    def _ids(self, ids_n: IntArray, model: PackedModel) -> Tensor:
        """[N] the ids as ``model`` reads them: a frozen one its last in the place of those that it lacks."""
        return self._tensor(ids_n if model is self.model else np.minimum(ids_n, model.config.vocabulary_size - 1))

    @property
    def routing(self) -> ExpertRouting | None:
        """The shape of the replayed experts; None: experts aren't replayed."""
        return self.model.config.routing if self._replays and isinstance(self.model, Decoder) else None

    def _replay(self, batch: MicroBatchArrays) -> ExpertReplay | None:
        rows = batch.token_rows.get(EXPERTS)
        if rows is None or (routing := self.routing) is None:
            return None
        if reason := routing.fault(rows):
            raise ExpertsMismatch(f"recorded experts: {reason}; algorithm.routing_replay = false trains without them")
        chosen_experts = self._tensor(rows.table(routing.width).astype(np.int16))
        return ExpertReplay.of(chosen_experts.view(-1, routing.layers, routing.per_token))

    def _kept(self, targets_m: IntArray, arrays: SampleArrays) -> MicroBatchSets | None:
        if KEPT not in arrays.token_rows and not arrays.grammars:
            return None
        if self._sets is None or self._sets.arrays is not arrays:
            self._sets = KeptSets(arrays, self.model.config.vocabulary_size, lambda: self._grammars)
        return self._sets.of(targets_m, self.device)

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(Tokenizer.load(self._folder, chat=self._chat), self.model.config.vocabulary_size, patient=True)

    def clear_kept_sets(self) -> None:
        """Discard the last batch's kept sets, which are cached for several passes."""
        self._sets = None

    def _pictures(self, batch: MicroBatchArrays) -> list[Pixels]:
        """The pixel arrays of each document; []: no document has any. Raises BufferCorrupt for missing arrays."""
        starts = np.cumsum(batch.input_lengths) - batch.input_lengths
        return self._read([pixels_of(batch.token_rows, start) for start in starts.tolist()] if batch.token_rows else [])

    def _read(self, digests: list[str]) -> list[Pixels]:
        if not any(digests):
            return []
        assert self.pixels is not None, "given where batches have pictures"
        return [self.pixels.read(digest) if digest else {} for digest in digests]

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of ``loss`` in the parameters."""
        with native.using(self._kernels):  # checkpointed layers must be recomputed as they were computed
            loss.backward()

    def flops(self, batch: MicroBatchArrays, model: PackedModel | None = None) -> float:
        """Model FLOP of one forward pass over the micro-batch by ``model`` (default: the model in training). Shared
        prefixes count once; recomputation by gradient checkpointing isn't counted."""
        config = (model or self.model).config
        return config.flops(batch.input_lengths, len(batch.targets_m), batch.continues)

    def training_flops(self, batch: MicroBatchArrays) -> float:
        """Model FLOP of forward and backward. With an adapter the model's matrices have no gradients; the adapter's few
        products aren't counted."""
        full_flops = 3.0 * self.flops(batch)
        if self.lora is None:
            return full_flops
        return full_flops - self.model.config.product_flops(sum(batch.input_lengths), len(batch.targets_m))

    def optimiser_settings(self, learning_rate: float) -> OptimiserSettings:
        """The run's optimiser settings with this learning rate."""
        settings = self.settings
        return OptimiserSettings(
            learning_rate=learning_rate,
            beta1=settings.betas[0],
            beta2=settings.betas[1],
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_grad_norm,
        )

    def update(self, settings: OptimiserSettings, loss: float, divisor: float = 1.0) -> Update:
        """Sum the gradients over the ranks, divide them by ``divisor``, clip them, take a step, and clear them.
        ``loss``: this rank's part of the step's loss.

        A loss or gradient norm that isn't finite on any rank skips the step on all ranks.
        """
        gradients = self.sum_gradients()
        if divisor != 1.0:
            for gradient in gradients:
                gradient /= divisor
        loss /= self.ranks.context  # whose ranks have the same one
        total_loss = float(self.ranks.sum_(torch.tensor(loss, dtype=torch.float64, device=self.device)))
        norm_tensor = torch.nn.utils.get_total_norm(gradients)
        if self._trains_rows:
            squares = self.ranks.sum_(norm_tensor.to(self.device, torch.float64).square(), "shards")
            norm_tensor = squares.sqrt().to(norm_tensor)
        grad_norm = float(norm_tensor)
        is_finite = math.isfinite(total_loss) and math.isfinite(grad_norm)
        if is_finite:
            if grad_norm > settings.max_grad_norm:
                torch.nn.utils.clip_grads_with_norm_(self.parameters, settings.max_grad_norm, norm_tensor)
            self.optimiser.step(settings)
            self.masters.round()
            if self.average is not None:
                self.average.update()
        self.clear_gradients()
        reason = "" if is_finite else f"loss {total_loss}, gradient norm {grad_norm}: not finite"
        return Update(applied=is_finite, reason=reason, grad_norm=grad_norm)

    def clear_gradients(self) -> None:
        """Discard all gradients. The next backward then stores its gradients instead of adding them to zeros, which
        saves two passes over memory."""
        self.masters.clear_gradients()
        for sharded in self._sharded:
            sharded.reset()

    def sum_gradients(self) -> list[Tensor]:
        """Sum the gradients over the ranks, in place, and return them; of parameters that ranks divide this rank's
        rows. A call of all ranks."""
        gradients = self.gradients()
        self.ranks.sum_all_(gradients, "copies" if self._trains_rows else "all")  # FSDP2 has summed over the shards
        return gradients

    def gradients(self) -> list[Tensor]:
        """The gradients of all parameters, with zeros for parameters that no micro-batch of this rank used."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def load_weights(self, path: str | Path) -> None:
        """Overwrite the weights with those of a folder that `stored_rows` has written, any model folder, or any adapter
        of the same base; the optimiser keeps its state. Raises ConfigurationError before any change, but for values
        that aren't finite."""
        with self.masters.exposed(), torch.no_grad():
            if self.lora is not None:
                load_into(self.lora, self.model, path, self._folder)
            elif self._writes_rows:
                read_weights(self.model, path)
            else:
                copy_weights(self.model, weights_of(open_model(self._chosen, torch.float32, self.device, path)))

    @property
    def writers(self) -> int:
        """The number of ranks, 0 and the following, that together have all rows of what is trained."""
        return self.ranks.size // self.ranks.count("copies") if self._trains_rows else 1

    @property
    def _writes_rows(self) -> bool:
        """Whether model folders are read and written by rows: those of transformers' architectures only if ranks divide
        the model, since not every architecture's tensors are made of rows of its parameters."""
        return self.lora is None and (self._trains_rows or isinstance(self.model, Decoder))

    def stored_rows(self) -> tuple[dict[str, FileTensor], list[Shard]]:
        """The tensors of a model folder, by name, and this rank's rows of the parameters they are made of, in float32
        and in these parameters' memory. Nothing if `write_folder` writes the tensors."""
        if not self._writes_rows:
            return {}, []
        with self.masters.exposed():
            return folder_rows(self.model)

    def write_folder(self, path: str | Path) -> None:
        """Write a model folder without the tensors of `stored_rows`: configuration and tokenizer; or all of the
        adapter, in float32. Not atomic."""
        with self.masters.exposed():
            save_policy(self.model, self.lora, path, self._folder, by_rows=self._writes_rows)

    def optimiser_shards(self, state: OptimiserState | None = None) -> list[Shard]:
        """This rank's rows of the optimiser's ``state`` (default: the present one), and of the averages of weights,
        named ``KIND/PARAMETER``, in its memory, none before the first step; and those of the attached state. Scalars
        are complete on every rank."""
        state, shards = self.optimiser.state if state is None else state, list[Shard]()
        averages = {} if self.average is None or not state else self.average.tensors
        shard_by_name = {shard.name: shard for shard in shards_of(self.weights())}
        for name, parameter in self.masters.trained().items():
            for kind, tensor in state.get(parameter, {}).items():
                shape, first = (shard_by_name[name].shape, shard_by_name[name].first) if tensor.ndim else ((), 0)
                shards.append(Shard(name=f"{kind}/{name}", shape=shape, first=first, tensor=tensor))
            if name in averages:
                shards.append(replace(shard_by_name[name], name=f"average/{name}", tensor=averages[name]))
        return shards + ([] if self.attached is None else self.attached.shards())

    def read_optimiser(self, files: StateFiles) -> OptimiserState:
        """Read this rank's rows of the optimiser's state of a checkpoint, and of the averages, which begin at the
        present weights if it has none. Raises CheckpointCorrupt for another model's."""
        has_stepped = any(not name.startswith(ATTACHED) for name in files.shapes)
        state = {parameter: self.optimiser.zero_state(parameter) for parameter in self.parameters if has_stepped}
        files.fill(self.optimiser_shards(state))
        if self.average is not None:
            self.average.update(decay=1.0 if state else 0.0)
        return state

    def resident(self) -> list[Tensor]:
        """All tensors that stay on the device between two calls: weights and their masters, the reference model's
        weights, gradients, and the optimiser's moments; of those that ranks divide this rank's rows."""
        models = [self.model, *self.frozen]
        tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
        tensors += [] if self.lora is None else list(self.lora.parameters.values())
        tensors += self.masters.tensors.values()
        tensors += [] if self.average is None else self.average.tensors.values()
        tensors += [] if self.attached is None else self.attached.resident()
        tensors += [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        tensors += [state_tensor for state in self.optimiser.state.values() for state_tensor in state.values()]
        tensors = [own_rows_of(tensor) if is_divided(tensor) else tensor for tensor in tensors]
        by_id = {id(tensor): tensor for tensor in tensors}  # PEFT's matrices are parameters of both
        return [tensor for tensor in by_id.values() if tensor.device.type == self.device.type]

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)
