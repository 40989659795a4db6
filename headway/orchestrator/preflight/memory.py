"""Memory and disk that the run's processes and files will need, from sizes alone, before they exist. Torch-free.

All numbers are what is needed *at most*: every KV slot full, the largest micro-batch. ``P`` parameters, ``b`` bytes of
a number in the dtype in question, ``c`` values cached of a token (`models/sizes.py`).

- generator replica: weights P·b (4·P while they are loaded), in float32 on one CPU core once more without
  experts, in the order its products read them in (`native_kernels_enabled`); KV cache slots·context·c·b; the buffer
  new versions are read into P·b (in the machine's memory, on a GPU as well); for one step the activations of a
  prefill, ``prefill_tokens_per_step``, and the float32 logits of every slot with what sampling makes of them. An
  adapter's revisions A·b each (with panels 8·A more): two, or under ``finish`` the budget's and two. vLLM
  keeps weights and KV as ``generator.dtype`` has them; with ``tensor_parallel_size`` each GPU has its share of both
- trainer rank: float32 weights, gradients and two moments 16·P, in bfloat16 (`trainer/master_weights.py`) the weights
  once more, 18·P; beside an adapter of A weights b·P, quantised P or 0.57·P, and 16·A or 18·A; the reference model P·b;
  activations of a micro-batch (`ModelSizes.activation_bytes`,
  `score_bytes`); logits of one chunk. Copies sum gradients in one more copy of up to 2^26 of them, or of the largest
  matrix. With ``shards`` a rank has 1/shards of weights, gradients and moments, in float32 alone; beside them what is
  outside of the layers is complete, and three layers, with the gradients of one of both (trainer/sharding.py).
  ``host_memory`` has the moments in the machine's memory, or all that is divided
- a GPU that both sides share under ``run.offload``: the larger side alone, and both contexts; what they offload is in
  the machine's memory
- published weights: 3 versions of P·b (of an adapter A·b) in /dev/shm, which is main memory and counted there too; the
  system shows them once more in every process that reads them. The trainer's GPU has a snapshot, P·b, until it is
  copied: in the memory of the gradients, which are freed then. `exports_weights` says where the GPU has the versions
- checkpoints: 12·P each (12·A; weights and two moments), one more than is kept while it is written, the best twice
- buffer: payloads stay until a durable checkpoint covers them, ~14 bytes a token
- kept sets: the ids of every response token where top_p or top_k leave some out, as many as
  ``truncation_support_tokens`` allows, in open rollouts, in the buffer and in the batch that each trainer rank is sent
- grammars: what the endpoint, the replicas and the ranks that replay them keep compiled, where programs call the model
- routing replay: the experts of every token, beside the KV, in open rollouts, in the buffer and in a micro-batch
- the record of rollouts: all of the run's, or the configured share: 17 bytes a token (the engine's 9, the trainer's 8)
  and 400 a rollout, up to ``ledger.rollouts_max_bytes``
"""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from headway.config.auto import Machine
from headway.config.engines import starts_vllm
from headway.config.schema import Experiment
from headway.generator.engines.torch.block_pool import BLOCK_TOKENS, whole_blocks
from headway.models.adapter_targets import adapted_targets
from headway.models.configuration import DecoderConfig
from headway.models.hf.configuration import adapter_size, implementation_of
from headway.models.routing import replayed_routing
from headway.models.sizes import ModelSizes, logit_rows, sizes_of
from headway.orchestrator.preflight.findings import Findings
from headway.records.check_report import MemoryPlace, MemoryUse
from headway.records.errors import ConfigurationError
from headway.runtime.devices import cpu_multiplies_bfloat16, native_kernels_enabled, parse_device, sharing, split_node
from headway.runtime.nodes.conditions import machine_memory
from headway.runtime.nodes.gpus import read_machine
from headway.tokens.grammar import MOST_CACHED_BYTES
from headway.weights.slots import SHARED_MEMORY

GIB = 2**30
FULL_SHARE = 0.9  # of the free bytes: beyond it, a warning

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
_KEPT_LOGIT_BYTES = 5  # of a logit over a kept set: once more, masked, and the mask
_SAMPLING_BYTES = 20  # of one logit: log-softmax and probabilities in float32, their sums in float64, the logits
_TOKEN_BYTES_IN_MEMORY = 90  # of a response token in the orchestrator: id, log-probability, mask as Python objects
_TOKEN_BYTES_ON_DISK = 14
_RECORDED_TOKEN_BYTES, _RECORDED_ROLLOUT_BYTES = 17, 400

_SUMMED_VALUES = 1 << 26  # of one sum of gradients over copies: trainer/ranks.py
_OFFLOADED_PARTS = ("weights", "gradients", "AdamW", "adapter", "KV cache")
_OF_NODE = " of node "  # in the name of a place


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
    published_bytes = _PUBLISHED_VERSIONS * weight_count * bytes_of(experiment.generator.dtype)
    experts, set_bytes = expert_bytes(experiment), kept_set_bytes(experiment, model)
    open_sets, all_sets = _of_sets(set_bytes * open_rollouts), _of_sets(set_bytes * (trained_rollouts + open_rollouts))
    base, open_bytes = BASE_BYTES["orchestrator"], open_tokens * (_TOKEN_BYTES_IN_MEMORY + experts)
    controller_use = ("controller", "memory", {"base": BASE_BYTES["controller"]})
    uses: list[tuple[str, str, dict[str, int]]] = [
        ("orchestrator", "memory", {"base": base, "open rollouts": open_bytes} | open_sets | _of_grammars(experiment)),
        (f"{workers} verifier" + "s" * (workers > 1), "memory", {"base": workers * BASE_BYTES["verifier"]}),
        *([] if experiment.control.mode == "off" else [controller_use]),
        *(("published weights", location, {"versions": published_bytes}) for location in _published_to(experiment)),
        ("checkpoints", run, {"checkpoints": kept_checkpoints * 12 * weight_count, "best": 2 * 4 * weight_count}),
        ("buffer", run, {"payloads": (trained_tokens + open_tokens) * (_TOKEN_BYTES_ON_DISK + experts)} | all_sets),
        *([] if experiment.ledger.rollouts == "none" else [("rollouts", run, {"record": _recorded_bytes(experiment)})]),
    ]
    other_uses = (MemoryUse(name=name, location=location, parts=parts) for name, location, parts in uses)
    return [*_generators(experiment, model), *_trainers(experiment, model), *other_uses]


def exports_weights(experiment: Experiment, machine: Machine | None = None) -> bool:
    """Whether versions stay in the memory of rank 0's GPU, two at a time, for replicas on this machine's GPUs. Their
    buffers are then there too, in the memory that loading took, unless the weights are float32."""
    generator, trainer_device = experiment.generator, experiment.trainer.devices[0]
    on_gpus = all(name.startswith("cuda:") for name in (trainer_device, *generator.devices))
    shards = experiment.trainer.shards_of(len(experiment.trainer.devices))  # their rows meet in the host's memory alone
    is_changing = shards > 1 or experiment.run.offload or experiment.control.devices == "move"
    if generator.engine != "torch" or experiment.model.adapter is not None or is_changing or not on_gpus:
        return False
    model, copies = sizes_of(experiment.model.path), Counter({trainer_device: 2})
    copies.update(generator.devices if generator.dtype == "float32" else ())
    copy_bytes = model.parameters * bytes_of(generator.dtype)
    return all(
        location.needed_bytes + copies[location.name] * copy_bytes <= FULL_SHARE * (location.capacity_bytes or 0)
        for location in memory_places(memory_uses(experiment, model), machine=machine)
        if location.name in copies
    )


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
    rollout_bytes = experiment.max_sequence_tokens * _RECORDED_TOKEN_BYTES + _RECORDED_ROLLOUT_BYTES
    record_bytes = round(rollout_count * rollout_bytes * (share if isinstance(share, float) else 1))
    return record_bytes if limit is None else min(record_bytes, limit)


def _published_to(experiment: Experiment) -> list[str]:
    """The places of published weights: this machine's shared memory, and that of nodes that generate."""
    nodes = dict.fromkeys(parse_device(device).node for device in experiment.generator.devices)
    return [str(SHARED_MEMORY), *(f"{SHARED_MEMORY}{_OF_NODE}{node}" for node in nodes if node)]


def _generators(experiment: Experiment, model: ModelSizes) -> Iterator[MemoryUse]:
    for index, device in enumerate(experiment.generator.devices):
        is_widened = parse_device(device).kind == "cpu" and not cpu_multiplies_bfloat16()
        dtype = "float32" if is_widened else experiment.generator.dtype
        yield from _generator(experiment, model, f"generator-{index}", device, bytes_of(dtype))


def _generator(experiment: Experiment, model: ModelSizes, name: str, device: str, width: int) -> Iterator[MemoryUse]:
    """``width``: bytes of a number it computes with, which KV and weights are kept as."""
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
        "packed weights": (4 if is_adapted else 8) * model.dense_parameters if packed else 0,
        "KV cache": kv_bytes,
        "activations": _step_bytes(experiment, model, width),
    }
    host_parts = {"base": BASE_BYTES["generator"], "update buffer": trained * bytes_of(settings.dtype)}
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
    settings, weight_count, trained_count = experiment.trainer, model.parameters, trained_weights(experiment, model)
    checkpointing, quantization = settings.gradient_checkpointing, experiment.model.quantization
    is_adapted, width = experiment.model.adapter is not None, bytes_of(settings.dtype)
    matrix_bytes = _QUANTISED_BYTES_OF_WEIGHT.get(quantization or "", width)  # of a weight that may be quantised
    base = width * model.outside + round(matrix_bytes * (weight_count - model.outside)) if is_adapted else 0
    master_bytes = 4 + (width if settings.dtype != "float32" else 0)  # and the weight that the model computes with
    batch_tokens, rank_count = max(settings.micro_batch_tokens, experiment.max_sequence_tokens), len(settings.devices)
    if settings.micro_batch_samples is not None:
        batch_tokens = settings.micro_batch_samples * experiment.max_sequence_tokens
    sample_count = experiment.queue.groups_per_step * experiment.largest_group
    batch_tokens = min(batch_tokens, -(-sample_count // max(1, rank_count)) * experiment.max_sequence_tokens)
    in_place = parse_device(split_node(settings.devices[0])[1]).kind != "cpu" and not experiment.kept_sets
    rows = logit_rows(model.vocabulary_size, on_gpu=in_place)
    logit_bytes = width if in_place else 4 * _LOGIT_COPIES + (_KEPT_LOGIT_BYTES if experiment.kept_sets else 0)
    shards, trained_shards = settings.shards_of(rank_count), 1 if is_adapted else settings.shards_of(rank_count)
    if (gathers := shards > 1 or settings.host_memory == "all") and not is_adapted:
        master_bytes = 4
    own_count = -(-trained_count // trained_shards)
    summed_count = min(own_count, max(_SUMMED_VALUES, model.outside)) if rank_count > trained_shards else 0
    device_parts = {
        "weights": base // shards + master_bytes * own_count,
        "gradients": 4 * (own_count + summed_count),
        "AdamW": 8 * own_count,
        "activations": model.activation_bytes(batch_tokens, width, checkpointing)
        + model.score_bytes(batch_tokens, experiment.max_sequence_tokens, width, checkpointing)
        + 2 * batch_tokens * expert_bytes(experiment),
        "logits": min(rows, batch_tokens) * model.vocabulary_size * logit_bytes,
    }
    if gathers:
        device_parts["gathered"] = _gathered_bytes(model, width, trains=not is_adapted)
    if experiment.algorithm.kl_coefficient > 0:
        folder = experiment.model.reference
        reference_sizes = sizes_of(folder) if folder else model
        # the reference is then the model without its adapter
        shares_model = is_adapted and (not folder or Path(folder) == Path(experiment.model.path))
        reference_bytes = reference_sizes.parameters * width // shards
        reference_bytes += _gathered_bytes(reference_sizes, width, trains=False) if gathers else 0
        device_parts["reference"] = 0 if shares_model else reference_bytes
    moved_parts = {"none": (), "optimiser": ("AdamW",), "all": ("weights", "gradients", "AdamW")}[settings.host_memory]
    moved = {part: device_parts.pop(part) for part in moved_parts}
    for rank, device in enumerate(settings.devices):
        host_parts = (
            {"base": BASE_BYTES["trainer"]} | moved | _of_sets(sample_count * kept_set_bytes(experiment, model))
        )
        host_parts |= _of_grammars(experiment) if experiment.kept_sets else {}
        yield from _on_device(experiment, f"trainer-{rank}", device, device_parts, host_parts)


def _gathered_bytes(model: ModelSizes, width: int, *, trains: bool) -> int:
    """Bytes of complete units beside a rank's rows: what is outside of the layers for a whole pass, of layers the one
    that computes, the next one, and its buffer; gradients before they are summed, with the buffer of one sum."""
    outside, layer = model.outside, max(layer.parameters for layer in model.layers)
    weight_bytes = width * (outside + 3 * layer)
    return weight_bytes + (4 * outside + max(4 * outside, (width + 4) * layer) if trains else 0)


def fewest_shards(experiment: Experiment, machine: Machine) -> int:
    """The smallest number of ranks that divide a copy of the model so that the trainer's devices have the memory; all
    of them if none do, and 1 if the model's sizes are unknown."""
    ranks = len(experiment.trainer.devices)
    try:
        model = sizes_of(experiment.model.path)
        for shards in (number for number in range(1, ranks) if ranks % number == 0):
            trainer = experiment.trainer.model_copy(update={"shards": shards})
            uses = memory_uses(experiment.model_copy(update={"trainer": trainer}), model)
            trainer_places = {use.location for use in uses if use.name.startswith("trainer")}
            places = [place for place in memory_places(uses, machine=machine) if place.name in trainer_places]
            if all(place.capacity_bytes is None or place.needed_bytes <= place.capacity_bytes for place in places):
                return shards
    except ConfigurationError:  # check reports the model
        return 1
    return ranks


def _on_device(
    experiment: Experiment, name: str, device: str, on_device: dict[str, int], on_host: dict[str, int]
) -> Iterator[MemoryUse]:
    node_name, local_name = split_node(device)
    memory_place = f"memory{_OF_NODE}{node_name}" if node_name else "memory"
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


# --- capacities ------------------------------------------------------------------------------------------


def memory_places(
    uses: list[MemoryUse], on_nodes: Mapping[str, tuple[int, int]] = {}, machine: Machine | None = None
) -> list[MemoryPlace]:
    """Compute each place's needed, total and available bytes; None where the latter two are unknown. ``on_nodes``: the
    (total, available) bytes of places on nodes; ``machine``: this one's facts, or a described machine, of which GPUs
    alone are known."""
    machine = machine or read_machine()
    needed_bytes: Counter[str] = Counter()
    for memory_use in uses:
        needed_bytes[memory_use.location] += memory_use.total_bytes
    for name in needed_bytes:  # of sides that offload each other the smaller one's memory is free
        offloadable_bytes = Counter[bool]()
        for memory_use in uses:
            if memory_use.location == name and memory_use.offloadable_bytes:
                offloadable_bytes[memory_use.name.startswith("trainer")] += memory_use.offloadable_bytes
        needed_bytes[name] -= min(offloadable_bytes.values()) if len(offloadable_bytes) > 1 else 0
    if "memory" in needed_bytes:  # where files in /dev/shm are, too
        needed_bytes["memory"] += needed_bytes[str(SHARED_MEMORY)]
    places: list[MemoryPlace] = []
    for name, nbytes in needed_bytes.items():
        if machine.described and not name.startswith("cuda:"):
            place_sizes = (machine.memory_bytes,) * 2 if name == "memory" and machine.memory_bytes else None
        elif name == "memory":
            place_sizes = machine_memory()
        elif name.startswith("cuda:"):
            place_sizes = next(((gpu.memory_bytes, gpu.free_bytes) for gpu in machine.cuda[int(name[5:]) :]), None)
        elif _is_on_node(name):  # only its agent knows
            place_sizes = on_nodes.get(name)
        elif name == str(SHARED_MEMORY) and not SHARED_MEMORY.is_dir():
            place_sizes = (0, 0)
        else:
            place_sizes = _disk(Path(name))
        capacity, available = place_sizes if place_sizes is not None else (None, None)
        places.append(MemoryPlace(name=name, needed_bytes=nbytes, capacity_bytes=capacity, available_bytes=available))
    return places


def _is_on_node(name: str) -> bool:
    return _OF_NODE in name or "/cuda:" in name


def _disk(path: Path) -> tuple[int, int] | None:
    try:
        usage = shutil.disk_usage(nearest_folder(path))
    except OSError:
        return None
    return usage.total, usage.free


def nearest_folder(path: Path) -> Path:
    """``path`` or the nearest folder above it that exists."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path


# --- findings --------------------------------------------------------------------------------------------


def memory_findings(uses: list[MemoryUse], places: list[MemoryPlace]) -> Findings:
    """Check the places: an error for needs beyond the capacity, a warning beyond ``FULL_SHARE`` of the free bytes."""
    findings = Findings()
    for location in places:
        if location.capacity_bytes is not None and location.available_bytes is not None:
            local_uses = [use for use in uses if use.location == location.name]
            if location.name.partition(_OF_NODE)[0] == str(SHARED_MEMORY):
                _check_shared_memory(location, location.available_bytes, findings)
            elif location.name == "memory" or location.name.startswith("cuda:") or _is_on_node(location.name):
                _check_memory(local_uses, location, location.capacity_bytes, location.available_bytes, findings)
            else:
                _check_disk(local_uses, location, location.available_bytes, findings)
    return findings


def _check_shared_memory(location: MemoryPlace, free: int, findings: Findings) -> None:
    if location.needed_bytes > free:
        problem_text = f"{location.name} has no space for {gibibytes(location.needed_bytes)} of published weights"
        findings.warning("weights", f"{problem_text}: the temporary folder will be used, which is slower")


def _check_memory(uses: list[MemoryUse], location: MemoryPlace, capacity: int, free: int, findings: Findings) -> None:
    user = max(uses, key=lambda use: use.total_bytes)
    purpose = max(user.parts, key=lambda part: user.parts[part])
    needs = f"up to {gibibytes(location.needed_bytes)} of {location.name} needed (most by {user.name}: {purpose})"
    if location.needed_bytes > capacity:
        findings.error(_key(user, purpose), f"{needs}, but there are only {gibibytes(capacity)}")
    elif location.needed_bytes > FULL_SHARE * free:
        findings.warning(_key(user, purpose), f"{needs}, and {gibibytes(free)} are free now")


def _check_disk(uses: list[MemoryUse], location: MemoryPlace, free: int, findings: Findings) -> None:
    """Checkpoints are sure to come; the buffer is as large as stated only if every response is as long as allowed."""
    checkpoint_bytes = sum(use.total_bytes for use in uses if use.name == "checkpoints")
    folder, needed_text = nearest_folder(Path(location.name)), gibibytes(checkpoint_bytes)
    if checkpoint_bytes > free:
        findings.error("run.directory", f"{gibibytes(free)} free at {folder}, but checkpoints need {needed_text}")
    elif location.needed_bytes > FULL_SHARE * free:
        rest_text = gibibytes(location.needed_bytes - checkpoint_bytes)
        others = "the buffer and the record of rollouts (ledger.rollouts)"
        reason = f"only {gibibytes(free)} free at {folder}; checkpoints need {needed_text}, {others} up to {rest_text}"
        findings.warning("run.directory", reason)


def _key(use: MemoryUse, purpose: str) -> str:
    if use.name.startswith("generator"):
        return "generator.slots" if purpose in ("KV cache", "activations") else "model.path"
    if use.name.startswith("trainer"):
        return "trainer.micro_batch_tokens" if purpose in ("activations", "logits") else "model.path"
    return {"orchestrator": "queue.budget", "controller": "control.mode"}.get(use.name, "verifier.workers")


def gibibytes(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.1f} MiB"


def peak_resident_bytes(process_id: int) -> int | None:
    """Peak resident memory of a live process, without the memory that it shares through /dev/shm; None when it is gone.
    Published weights are there, and are counted once."""
    try:
        status_lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
        words_by_name = {field: words.split() for field, _, words in (line.partition(":") for line in status_lines)}
        return (int(words_by_name["VmHWM"][0]) - int(words_by_name["RssShmem"][0])) << 10
    except (OSError, KeyError, ValueError):
        return None
