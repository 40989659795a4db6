"""Memory and disk that the run's processes and files will need, from sizes alone, before they exist. Torch-free.

All numbers are what is needed *at most*: every KV slot full, the largest micro-batch. ``P`` parameters, ``b`` bytes of
a number in the dtype in question, ``c`` values cached of a token (`models/sizes.py`).

- generator replica: weights P·b (4·P while they are loaded), in float32 on one CPU core once more without
  experts, in the order its products read them in (`native_kernels_enabled`); KV cache slots·context·c·b; the buffer
  new versions are read into P·b (in the machine's memory, on a GPU as well); for one step the activations of a
  prefill, ``prefill_tokens_per_step``, and the float32 logits of every slot with what sampling makes of them. An
  adapter's revisions A·b each (with panels 8·A more): two, or under ``finish`` the budget's and two. vLLM
  keeps weights and KV as ``generator.dtype`` has them; with ``tensor_parallel_size`` each GPU has its share of both
- teacher's replica: the same for one sequence, without what new versions need
- trainer rank: float32 weights, gradients and two moments 16·P, in bfloat16 (`trainer/master_weights.py`) the weights
  once more, 18·P; under Muon one moment of each weight in layers; beside an adapter of A weights b·P, quantised P or
  0.57·P, and 16·A or 18·A; a critic's own network as the trained model, beside it; the reference model P·b, as a
  moving average 4·P or 6·P; activations of a micro-batch
  (`ModelSizes.activation_bytes`, `score_bytes`); logits of one chunk. Copies sum gradients in one more copy of up to
  2^26 of them, or of the largest matrix. With ``shards`` a rank has 1/shards of weights, gradients and moments, in
  float32 alone; beside them what is outside of the layers is complete, and three layers, with the gradients of one of
  both (trainer/sharding.py).
  ``context_parallel`` ranks are shards too, and each has its part of a micro-batch's tokens; of ``expert_parallel``
  ranks each gathers its experts alone. ``host_memory`` has the moments in the machine's memory, or all that is divided
- a GPU that both sides share under ``run.offload``: the larger side alone, and both contexts; what they offload is in
  the machine's memory
- published weights: 3 versions of P·b (of an adapter A·b) in /dev/shm, which is main memory and counted there too; the
  system shows them once more in every process that reads them. The trainer's GPU has a snapshot, P·b, until it is
  copied: in the memory of the gradients, which are freed then. `capacity.exports_weights` says where the GPU has
  the versions
- checkpoints: 12·P each (12·A; weights and two moments), 16·P with averages, and 12·P of a critic's own network, one
  more than is kept while it is written, the best twice
- buffer: payloads stay until a durable checkpoint covers them, ~14 bytes a token
- kept sets: the ids of every response token where top_p or top_k leave some out, as many as
  ``truncation_support_tokens`` allows, in open rollouts, in the buffer and in the batch that each trainer rank is sent
- grammars: what the endpoint, the replicas and the ranks that replay them keep compiled, where programs call the model
- routing replay: the experts of every token, beside the KV, in open rollouts, in the buffer and in a micro-batch
- the record of rollouts: all of the run's, or the configured share: 17 bytes a token (the engine's 9, the trainer's 8),
  4 more with a critic
  and 400 a rollout, up to ``ledger.rollouts_max_bytes``
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from headway.config.engines import starts_vllm
from headway.config.external_models import SELF
from headway.config.objective.critic import ADAPTER, GAE, TRUNK
from headway.config.schema import Experiment, TrainerConfig
from headway.generator.engines.torch.block_pool import BLOCK_TOKENS, whole_blocks
from headway.models.adapter_targets import adapted_targets
from headway.models.configuration import DecoderConfig
from headway.models.hf.configuration import adapter_size, implementation_of
from headway.models.parallel.divisors import require_heads
from headway.models.routing import replayed_routing
from headway.models.sizes import ModelSizes, logit_rows, sizes_of
from headway.orchestrator.teachers.replicas import teacher_experiment
from headway.records.check_report import MemoryUse
from headway.records.errors import ConfigurationError
from headway.runtime.devices import cpu_multiplies_bfloat16, native_kernels_enabled, parse_device, sharing, split_node
from headway.tokens.grammar import MOST_CACHED_BYTES
from headway.weights.deltas import MOST_OF_WHOLE
from headway.weights.slots import SHARED_MEMORY

# Resident memory of a process before it holds any model: Python, and torch where it is used. Measured on Linux with
# torch's CPU build: 246, 692 (a replica with vLLM), 360, 110, 44 and 38 MiB, and rounded up (a CUDA build adds the
# libraries it loads).
BASE_BYTES = {
    "generator": 280 << 20,
    "vllm": 700 << 20,
    "trainer": 380 << 20,
    "orchestrator": 140 << 20,
    "verifier": 60 << 20,
    "controller": 50 << 20,
}
CUDA_CONTEXT_BYTES = 740 << 20  # of GPU memory, for the context and its libraries: 716 with CUDA 13 on an H200

_QUANTISED_BYTES_OF_WEIGHT = {"8bit": 1.02, "4bit": 0.57}  # in a trainer, with the scales of blocks
_PUBLISHED_VERSIONS = 3  # slots of weights/shared_memory.py
_LOGIT_COPIES = 5  # of a CPU's chunk: logits, log-softmax, entropy's two, a gradient; 4 bytes each; a GPU's: 1
_ENTROPY_COPIES = 2  # of a CPU's chunk more: entropy's slopes and the sum of both gradients
_KEPT_LOGIT_BYTES = 5  # of a logit over a kept set: once more, masked, and the mask
_SAMPLING_BYTES = 20  # of one logit: log-softmax and probabilities in float32, their sums in float64, the logits
_TOKEN_BYTES_IN_MEMORY = 90  # of a response token in the orchestrator: id, log-probability, mask as Python objects
_TOKEN_BYTES_ON_DISK = 14
_RECORDED_TOKEN_BYTES, _RECORDED_VALUE_BYTES, _RECORDED_ROLLOUT_BYTES = 17, 4, 400

_SUMMED_VALUES = 1 << 26  # of one sum of gradients over copies: trainer/ranks.py
_OFFLOADED_PARTS = ("weights", "gradients", "AdamW", "adapter", "KV cache")
OF_NODE = " of node "  # in the name of a place


def bytes_of(dtype: str) -> int:
    """Bytes of one number."""
    return 2 if dtype in ("bfloat16", "float16") else 4


def trained_weights(experiment: Experiment, model: ModelSizes) -> int:
    """Count the weights that are trained, published and saved: the model's, or its adapter's."""
    adapter, folder = experiment.model.adapter, experiment.model.path
    if adapter is None:
        return model.parameters
    if implementation_of(folder, experiment.model.implementation) == "transformers":
        return adapter_size(folder, adapter)
    decoder = DecoderConfig.from_pretrained(Path(folder))
    return sum(target.size for target in adapted_targets(decoder, adapter))


def uncovered_groups(experiment: Experiment) -> int:
    """The largest number of trained groups whose payloads are kept at once: no kept checkpoint covers them."""
    settings = experiment.checkpoint
    return min(experiment.run.steps, settings.every_steps * (settings.keep_last + 1)) * experiment.queue.groups_per_step


def memory_uses(experiment: Experiment, model: ModelSizes) -> list[MemoryUse]:
    """List the bytes that each process and kind of file needs, with the place where it needs them."""
    queue_settings, run, weight_count = experiment.queue, experiment.run.directory, trained_weights(experiment, model)
    open_rollouts = queue_settings.groups_per_step * (queue_settings.budget + 1) * experiment.largest_group
    open_tokens = open_rollouts * experiment.max_sequence_tokens
    workers, kept_checkpoints = experiment.verifier.workers, experiment.checkpoint.keep_last + 1
    trained_rollouts = uncovered_groups(experiment) * experiment.largest_group
    trained_tokens = trained_rollouts * experiment.max_sequence_tokens
    checkpoint_bytes = kept_checkpoints * _saved_bytes(experiment, model, weight_count)
    if (critic := critic_network(experiment)) is not None:
        checkpoint_bytes += kept_checkpoints * _saved_bytes(*critic, trained_weights(*critic))
    version_bytes = weight_count * bytes_of(experiment.generator.dtype)
    published = {"versions": _PUBLISHED_VERSIONS * version_bytes}
    kept_delta_bytes = experiment.checkpoint.delta_bytes
    if len(_published_to(experiment)) > 1 and experiment.weights.whole_every > 1:
        published["deltas"] = int(MOST_OF_WHOLE * version_bytes)
    experts, set_bytes = expert_bytes(experiment), kept_set_bytes(experiment, model)
    open_sets, all_sets = _of_sets(set_bytes * open_rollouts), _of_sets(set_bytes * (trained_rollouts + open_rollouts))
    base, open_bytes = BASE_BYTES["orchestrator"], open_tokens * (_TOKEN_BYTES_IN_MEMORY + experts)
    controller_use = ("controller", "memory", {"base": BASE_BYTES["controller"]})
    uses: list[tuple[str, str, dict[str, int]]] = [
        ("orchestrator", "memory", {"base": base, "open rollouts": open_bytes} | open_sets | _of_grammars(experiment)),
        (f"{workers} verifier" + "s" * (workers > 1), "memory", {"base": workers * BASE_BYTES["verifier"]}),
        *([] if experiment.control.mode == "off" else [controller_use]),
        *(("published weights", location, published) for location in _published_to(experiment)),
        ("checkpoints", run, {"checkpoints": checkpoint_bytes + kept_delta_bytes, "best": 2 * 4 * weight_count}),
        ("buffer", run, {"payloads": (trained_tokens + open_tokens) * (_TOKEN_BYTES_ON_DISK + experts)} | all_sets),
        *([] if experiment.ledger.rollouts == "none" else [("rollouts", run, {"record": _recorded_bytes(experiment)})]),
    ]
    other_uses = (MemoryUse(name=name, location=location, parts=parts) for name, location, parts in uses)
    return [*_generators(experiment, model), *teacher_uses(experiment), *_trainers(experiment, model), *other_uses]


def expert_bytes(experiment: Experiment) -> int:
    """Bytes that the recorded experts of a token take; 0 where none are replayed."""
    routing = replayed_routing(experiment)
    return 0 if routing is None else routing.row_bytes


def kept_set_bytes(experiment: Experiment, model: ModelSizes) -> int:
    """Bytes that the kept sets of a rollout take at most; 0 where none are stored."""
    rollout, vocabulary = experiment.rollout, model.vocabulary_size
    if not (rollout.truncates and experiment.kept_sets):
        return 0
    id_count = min(experiment.kept_sets, vocabulary, rollout.top_k or vocabulary)
    return rollout.max_response_tokens * (id_count * (2 if vocabulary <= 1 << 16 else 4) + 4)


def _of_grammars(experiment: Experiment) -> dict[str, int]:
    return {"grammars": MOST_CACHED_BYTES} if experiment.environment.calls else {}


def _of_sets(size: int) -> dict[str, int]:
    return {"kept sets": size} if size else {}


def _recorded_bytes(experiment: Experiment) -> int:
    """Size of RUN/rollouts at the run's end, of trained rollouts alone."""
    share, limit = experiment.ledger.rollouts, experiment.ledger.rollouts_max_bytes
    rollout_count = experiment.run.steps * experiment.queue.groups_per_step * experiment.largest_group
    token_bytes = _RECORDED_TOKEN_BYTES + (_RECORDED_VALUE_BYTES if experiment.algorithm.advantage == GAE else 0)
    rollout_bytes = experiment.max_sequence_tokens * token_bytes + _RECORDED_ROLLOUT_BYTES
    record_bytes = round(rollout_count * rollout_bytes * (share if isinstance(share, float) else 1))
    return record_bytes if limit is None else min(record_bytes, limit)


def _published_to(experiment: Experiment) -> list[str]:
    """The places of published weights: this machine's shared memory, and that of nodes that generate."""
    nodes = dict.fromkeys(parse_device(device).node for device in experiment.generator.devices)
    return [str(SHARED_MEMORY), *(f"{SHARED_MEMORY}{OF_NODE}{node}" for node in nodes if node)]


def _generators(experiment: Experiment, model: ModelSizes, role: str = "generator") -> Iterator[MemoryUse]:
    for index, device in enumerate(experiment.generator.devices):
        is_widened = parse_device(device).kind == "cpu" and not cpu_multiplies_bfloat16()
        dtype = "float32" if is_widened else experiment.generator.dtype
        is_updated = role == "generator"
        yield from _generator(experiment, model, f"{role}-{index}", device, bytes_of(dtype), is_updated)


def teacher_uses(experiment: Experiment) -> Iterator[MemoryUse]:
    """Yield the memory that the replicas of teachers need."""
    for name, teacher in experiment.used_teachers.items():
        scorers = teacher_experiment(experiment, teacher)
        yield from _generators(scorers, sizes_of(teacher.path), f"teacher-{name}") if teacher.devices else ()


def _generator(
    experiment: Experiment, model: ModelSizes, name: str, device: str, width: int, updated: bool
) -> Iterator[MemoryUse]:
    """``width``: bytes of a number it computes with, which KV and weights are kept as. ``updated``: it gets new
    versions, as no teacher does."""
    settings, weight_count = experiment.generator, model.parameters
    if settings.engine == "vllm-server":
        parts = {"base": BASE_BYTES["generator"], "written for the server": weight_count * bytes_of(settings.dtype)}
        yield MemoryUse(name=name, location="memory", parts=parts)
        name = f"{name}'s server"
    if settings.engine != "torch":
        yield from _vllm(experiment, model, name, device) if starts_vllm(settings.engine, settings.devices) else ()
        return
    kv_tokens = settings.slots * whole_blocks(min(experiment.max_sequence_tokens, model.max_positions))
    if settings.kv_capacity_tokens is not None:
        kv_tokens = min(kv_tokens, whole_blocks(settings.kv_capacity_tokens))
    # Beyond windows as well.
    kv_bytes = (kv_tokens + BLOCK_TOKENS) * (model.cached_values * width + expert_bytes(experiment))
    packed = native_kernels_enabled() and parse_device(device).threads == 1 and width == 4
    trained, is_adapted = trained_weights(experiment, model), experiment.model.adapter is not None
    revisions = 0 if not is_adapted else experiment.queue.budget + 2 if settings.update_mode == "finish" else 2
    device_parts = {
        "weights": 4 * weight_count,  # in bfloat16 half of it stays
        "adapter": revisions * trained * (width + (8 if packed else 0)),  # panels of B hold a product's ranks together
        # those of the next version are packed beside them
        "packed weights": (8 if updated and not is_adapted else 4) * model.dense_parameters if packed else 0,
        "KV cache": kv_bytes,
        "activations": _step_bytes(experiment, model, width),
    }
    host_parts = {"base": BASE_BYTES["generator"], "update buffer": updated * trained * bytes_of(settings.dtype)}
    host_parts |= _of_grammars(experiment)
    yield from _on_device(experiment, name, device, device_parts, host_parts)


def _vllm(experiment: Experiment, model: ModelSizes, name: str, device: str) -> Iterator[MemoryUse]:
    """Memory of a vLLM replica. Each rank is a process on a GPU of its own, and reads new weights where they are."""
    settings, width = experiment.generator, bytes_of(experiment.generator.dtype)
    arguments, rank_count = settings.engine_arguments, settings.engine_arguments.get("tensor_parallel_size", 1)
    weight_bytes = model.parameters * width
    slot_tokens = min(experiment.max_sequence_tokens, model.max_positions)
    kv_tokens = settings.kv_capacity_tokens or settings.slots * slot_tokens
    kv_bytes = model.cached_values // model.kv_heads * -(-model.kv_heads // rank_count) * kv_tokens * width
    if "gpu_memory_utilization" in arguments or "num_gpu_blocks_override" in arguments:
        kv_bytes = 0  # the free memory, or an unknown size
    on_cpu = parse_device(device).kind == "cpu"
    packed_bytes = model.vocabulary_size * model.width * width if on_cpu and model.tied else 0  # the head's own copy
    device_parts = {
        "weights": -(-weight_bytes // rank_count),
        "packed weights": packed_bytes,
        "KV cache": arguments.get("kv_cache_memory_bytes", kv_bytes),
        "activations": _step_bytes(experiment, model, width),
    }
    host_parts = {"base": BASE_BYTES["vllm"]}
    if on_cpu:
        yield from _on_device(experiment, name, device, device_parts, host_parts)
        return
    first_device = parse_device(device)
    for rank in range(rank_count):
        rank_name = f"{name} rank {rank}" if rank else name
        yield from _on_device(
            experiment,
            rank_name,
            str(dataclasses.replace(first_device, first=first_device.first + rank, last=first_device.first + rank)),
            device_parts,
            host_parts,
        )


def _step_bytes(experiment: Experiment, model: ModelSizes, width: int) -> int:
    """Bytes of the activations of the largest step, and of the sampling of its logits."""
    settings = experiment.generator
    # Resumed requests, and all of them after an update that recomputes, prefill what they have sampled as well.
    longest_tokens = experiment.max_sequence_tokens
    step_tokens = longest_tokens if experiment.run.deterministic else settings.prefill_tokens_per_step
    prefill_tokens = min(step_tokens, settings.slots * longest_tokens)
    widest_layer = max(2 * layer.joint + 3 * layer.intermediate for layer in model.layers)
    work_bytes = prefill_tokens * width * (3 * model.width + widest_layer)
    if model.attention_softcap is not None:
        context = min(longest_tokens, model.max_positions, settings.kv_capacity_tokens or longest_tokens)
        work_bytes += 12 * model.heads * prefill_tokens * max(model.scored_keys(context))  # scores, three times over
    return work_bytes + settings.slots * model.vocabulary_size * _SAMPLING_BYTES


def _trainers(experiment: Experiment, model: ModelSizes) -> Iterator[MemoryUse]:
    settings = experiment.trainer
    sample_count = experiment.queue.groups_per_step * experiment.largest_group
    device_parts, moved_parts = trainer_parts(experiment, model)
    critic = critic_network(experiment)
    networks = [(experiment, model), *([critic] if critic is not None else [])]
    is_divided = any(network.model.adapter is None for network, _ in networks)
    writers = RankLayout.of(settings).ranks if is_divided else 1
    for rank, device in enumerate(settings.devices):
        host_parts = {"base": BASE_BYTES["trainer"]} | moved_parts
        host_parts |= _of_sets(sample_count * kept_set_bytes(experiment, model))
        host_parts |= _of_grammars(experiment) if experiment.kept_sets else {}
        if not experiment.run.offload and rank < writers:  # the copy that is written beside the next steps
            host_parts["checkpoint"] = sum(_saved_bytes(*network, _own_count(*network)) for network in networks)
        yield from _on_device(experiment, f"trainer-{rank}", device, device_parts, host_parts)


def trainer_parts(experiment: Experiment, model: ModelSizes) -> tuple[dict[str, int], dict[str, int]]:
    """The bytes that a trainer rank needs on its device, and those that ``trainer.host_memory`` has in the machine's
    memory instead."""
    settings, is_adapted, width = experiment.trainer, experiment.model.adapter is not None, _trainer_width(experiment)
    layout = RankLayout.of(settings)
    gathers = max(layout) > 1 or settings.host_memory == "all"
    parts = _trained_parts(experiment, model, layout) | _batch_parts(experiment, model, layout)
    if experiment.algorithm.advantage == GAE:
        # hidden states that the head reads in float32, the head and its moments
        parts["critic"] = 4 * model.width * (_rank_tokens(experiment, layout) + 4)
    if (critic := critic_network(experiment)) is not None:
        for name, size in _trained_parts(*critic, layout).items():
            parts[name] += size
        parts["activations"] = max(parts["activations"], _batch_parts(*critic, layout)["activations"])
    frozen_folders = {f"teacher {name}": t.path for name, t in experiment.used_teachers.items() if not t.scores}
    if any(rule.kl_coefficient > 0 for rule in experiment.rules.algorithms):
        frozen_folders["reference"] = experiment.model.reference or experiment.model.path
    for name, folder in frozen_folders.items():
        # with an adapter the model's own folder is the model without it
        if folder == SELF or (is_adapted and Path(folder) == Path(experiment.model.path)):
            parts[name] = 0
            continue
        sizes, weight_bytes = model if folder == experiment.model.path else sizes_of(folder), width
        if name == "reference" and experiment.algorithm.reference_decay is not None:
            # averages in float32, and beside them what the model computes with
            weight_bytes = 4 + (width if settings.dtype != "float32" and not gathers else 0)
        parts[name] = weight_bytes * layout.rows_of(sizes.parameters)
        parts[name] += _gathered_bytes(sizes, layout, width, trains=False) if gathers else 0
    moved_names = {"none": (), "optimiser": ("AdamW",), "all": ("weights", "gradients", "AdamW")}[settings.host_memory]
    return parts, {name: parts.pop(name) for name in moved_names}


def critic_network(experiment: Experiment) -> tuple[Experiment, ModelSizes] | None:
    """The experiment with the critic's own network as the model, and its sizes; None: it has none."""
    path, chosen = experiment.critic.path, experiment.model
    if experiment.algorithm.advantage != GAE or path == TRUNK:
        return None
    if path != ADAPTER:
        chosen = chosen.model_copy(update={"path": path, "adapter": None, "quantization": None})
    update: dict[str, Any] = {"model": chosen, "trainer": experiment.trainer.model_copy(update={"optimizer": "adamw"})}
    update["algorithm"] = experiment.algorithm.model_copy(update={"reference_decay": None})
    return experiment.model_copy(update=update), sizes_of(chosen.path)


def _trained_parts(experiment: Experiment, model: ModelSizes, layout: RankLayout) -> dict[str, int]:
    """The bytes of a model in training, or of one with an adapter, on a rank: weights, gradients and moments."""
    settings, is_adapted, width = experiment.trainer, experiment.model.adapter is not None, _trainer_width(experiment)
    ranks, gathers = len(settings.devices), max(layout) > 1 or settings.host_memory == "all"
    experts = sum(layer.experts for layer in model.layers)
    matrix_bytes = _QUANTISED_BYTES_OF_WEIGHT.get(experiment.model.quantization or "", width)
    matrix_count = layout.rows_of(model.parameters - experts - model.outside, experts)
    base_bytes = width * layout.rows_of(model.outside) + round(matrix_bytes * matrix_count) if is_adapted else 0
    # Masters, and the weights that the model computes with where these aren't gathered from them.
    master_bytes = 4 + (width if settings.dtype != "float32" and (is_adapted or not gathers) else 0)
    own_count = _own_count(experiment, model)
    is_summed = ranks > (1 if is_adapted else layout.ranks)
    summed_count = min(own_count, max(_SUMMED_VALUES, model.outside)) if is_summed else 0
    parts = {
        "weights": base_bytes + master_bytes * own_count,
        "gradients": 4 * (own_count + summed_count),
        "AdamW": _moment_bytes(experiment, model, own_count),
    }
    if gathers:
        parts["gathered"] = _gathered_bytes(model, layout, width, trains=not is_adapted)
    return parts


def _own_count(experiment: Experiment, model: ModelSizes) -> int:
    """A rank's part of the trained weights."""
    if experiment.model.adapter is not None:
        return trained_weights(experiment, model)
    experts = sum(layer.experts for layer in model.layers)
    return RankLayout.of(experiment.trainer).rows_of(model.parameters - experts, experts)


def _moment_bytes(experiment: Experiment, model: ModelSizes, weights: int) -> int:
    """Bytes of the moments of ``weights``: two of each, but one of those in layers under Muon."""
    return 8 * weights - (4 * (weights - model.outside) if experiment.trainer.optimizer == "muon" else 0)


def _saved_bytes(experiment: Experiment, model: ModelSizes, weights: int) -> int:
    """Bytes of ``weights`` in a checkpoint, with their averages and moments."""
    averages = 1 if experiment.algorithm.reference_decay is None else 2
    return 4 * averages * weights + _moment_bytes(experiment, model, weights)


class RankLayout(NamedTuple):
    """Numbers of the trainer's ranks that divide a copy's weights, a micro-batch's tokens and a mixture's experts."""

    ranks: int
    context: int
    experts: int

    @classmethod
    def of(cls, settings: TrainerConfig) -> RankLayout:
        return cls(*settings.layout_of(len(settings.devices)))

    def rows_of(self, weights: int, experts: int = 0) -> int:
        """A rank's part of ``weights``, and of ``experts`` weights in experts."""
        return -(-weights // self.ranks) + -(-experts // max(self.ranks, self.experts))


def divides_heads(model: ModelSizes, ranks: int) -> bool:
    """Whether as many ranks can divide the heads of attention, as ``trainer.context_parallel`` does."""
    try:
        require_heads(model.heads, model.kv_heads, ranks)
    except ConfigurationError:
        return False
    return True


def divides_experts(experiment: Experiment, model: ModelSizes) -> bool:
    """Whether ranks can divide the model's experts: it has some, and the project's decoder computes them."""
    is_ours = implementation_of(experiment.model.path, experiment.model.implementation) == "headway"
    return is_ours and any(layer.experts for layer in model.layers)


def _trainer_width(experiment: Experiment) -> int:
    return bytes_of(experiment.trainer.dtype)


def _rank_tokens(experiment: Experiment, layout: RankLayout) -> int:
    """A rank's tokens of the largest micro-batch."""
    settings, longest_tokens = experiment.trainer, experiment.max_sequence_tokens
    batch_tokens = max(settings.micro_batch_tokens, longest_tokens)
    if settings.micro_batch_samples is not None:
        batch_tokens = settings.micro_batch_samples * longest_tokens
    sample_count = experiment.queue.groups_per_step * experiment.largest_group
    share_count = max(1, len(settings.devices) // layout.context)  # ranks that divide a sequence have the same samples
    return -(-min(batch_tokens, -(-sample_count // share_count) * longest_tokens) // layout.context)


def _batch_parts(experiment: Experiment, model: ModelSizes, layout: RankLayout) -> dict[str, int]:
    """Bytes of the largest micro-batch: of what the backward of a rank's tokens needs, and of a chunk of logits."""
    settings, width, batch_tokens = experiment.trainer, _trainer_width(experiment), _rank_tokens(experiment, layout)
    checkpointing = settings.gradient_checkpointing
    activation_bytes = model.activation_bytes(batch_tokens, width, checkpointing)
    activation_bytes += model.score_bytes(batch_tokens, experiment.max_sequence_tokens, width, checkpointing)
    activation_bytes += 2 * batch_tokens * expert_bytes(experiment)
    if layout.experts > 1:  # the rows that a layer exchanges, and their gradients
        activation_bytes += 4 * batch_tokens * model.routed * model.width * width
    in_place = parse_device(split_node(settings.devices[0])[1]).kind != "cpu" and not experiment.kept_sets
    copies = _LOGIT_COPIES + (_ENTROPY_COPIES if experiment.algorithm.entropy_coefficient else 0)
    logit_bytes = width if in_place else 4 * copies + (_KEPT_LOGIT_BYTES if experiment.kept_sets else 0)
    logit_count = min(logit_rows(model.vocabulary_size, on_gpu=in_place), batch_tokens) * model.vocabulary_size
    return {"activations": activation_bytes, "logits": logit_count * logit_bytes}


def _gathered_bytes(model: ModelSizes, layout: RankLayout, width: int, *, trains: bool) -> int:
    """Bytes of complete units beside a rank's rows: what is outside of the layers for a whole pass, of layers the one
    that computes, the next one, and its buffer; gradients before they are summed, with the buffer of one sum."""
    layer = max(layer.parameters - layer.experts + layer.experts // layout.experts for layer in model.layers)
    outside = model.outside
    weight_bytes = width * (outside + 3 * layer)
    return weight_bytes + (4 * outside + max(4 * outside, (width + 4) * layer) if trains else 0)


def exchanged_bytes(experiment: Experiment, model: ModelSizes) -> dict[str, int]:
    """The bytes that a trainer rank receives for a micro-batch of the largest size, by what they are."""
    settings, layout, width = experiment.trainer, RankLayout.of(experiment.trainer), _trainer_width(experiment)
    is_adapted, passes = experiment.model.adapter is not None, 3 if settings.gradient_checkpointing == "full" else 2
    experts = sum(layer.experts for layer in model.layers)
    unit_count = model.parameters - experts + experts // layout.experts
    others = 1 - 1 / layout.ranks
    exchanged = {"gathered weights": round(others * width * (2 * unit_count - model.outside))}
    if not is_adapted:
        exchanged["summed gradients"] = round(others * 4 * unit_count)
    values = sum(layer.joint + layer.output for layer in model.layers) * (1 - 1 / layout.context)
    sparse_layers = sum(layer.experts > 0 for layer in model.layers)
    values += 2 * model.routed * model.width * sparse_layers * (1 - 1 / layout.experts)
    if values:
        exchanged["exchanged tokens"] = round(passes * values * width * _rank_tokens(experiment, layout))
    return exchanged


def _on_device(
    experiment: Experiment, name: str, device: str, on_device: dict[str, int], on_host: dict[str, int]
) -> Iterator[MemoryUse]:
    node_name, local_name = split_node(device)
    memory_place = f"memory{OF_NODE}{node_name}" if node_name else "memory"
    if parse_device(local_name).kind == "cpu":
        yield MemoryUse(name=name, location=memory_place, parts=on_host | on_device)
    else:
        other_devices = experiment.generator.devices if name.startswith("trainer") else experiment.trainer.devices
        offloads = experiment.run.offload and bool(sharing([device], other_devices))
        if offloads:  # to pinned memory, which has both for a moment when they change
            on_host = on_host | {"offloaded": sum(on_device.get(part, 0) for part in _OFFLOADED_PARTS)}
        yield MemoryUse(
            name=name,
            location=device,
            parts={"context": CUDA_CONTEXT_BYTES} | on_device,
            offloadable_bytes=sum(on_device.values()) if offloads else 0,
        )
        yield MemoryUse(name=name, location=memory_place, parts=on_host)
