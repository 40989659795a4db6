"""The vLLM engine: vLLM's scheduler and model in this process, behind the interface `Engine`."""
# pyright: reportMissingImports=false
# vLLM is installed where it is used, not where this is type-checked.

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from numpy.typing import NDArray

from headway.control.logprob_limits import compare, precision_of
from headway.generator.engines.requests import EngineRequest
from headway.generator.engines.settings import EngineSettings
from headway.generator.engines.vllm.adapters import VllmAdapters, VllmRevision
from headway.generator.engines.vllm.base_engine import VllmRequest, VllmRequests
from headway.generator.engines.vllm.core import SEED, StepOutput, VllmCore
from headway.models.configuration import DecoderConfig
from headway.models.offload import used_bytes
from headway.records.errors import ConfigurationError
from headway.records.execution import MemoryMove
from headway.records.generation import (
    AppliedWeights,
    EngineStatistics,
    PromptLogprobs,
    PublishedWeights,
    UpdateMode,
    probe_ids,
)
from headway.records.tokens import TokenRows
from headway.tokens.tokenizer import Tokenizer

_FIRST = -(1 << 60)  # priority of given tokens: before all requests
_IDLE_STEPS = 100  # limit of steps for given tokens, beside one for each


class VllmEngine(VllmRequests):
    """Generates for many requests at once with a `VllmCore`; see `TorchEngine` for what its methods promise.

    Differences: KV is counted in vLLM's blocks; a preempted request is computed again by vLLM's own rules (of several
    it takes the one with the highest priority number, then the youngest).

    If the probes after an update find that vLLM samples from anything but the published weights, the update raises
    WeightsMismatch and the engine samples no more.
    """

    def __init__(
        self,
        core: VllmCore,
        settings: EngineSettings,
        vocabulary: int,
        tokenizer: Tokenizer | None = None,
        adapters: VllmAdapters | None = None,
        *,
        mixture: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """The engine owns ``core``, which was built with ``settings`` and with the arguments of ``adapters``. Raises
        ConfigurationError for an adapter that vLLM doesn't compute."""
        super().__init__(
            settings,
            name="vLLM",
            context_tokens=core.context_tokens,
            vocabulary=vocabulary,
            tokenizer=tokenizer,
            truncates=core.own_sampling,
            precision=precision_of(
                settings.dtype, quantised="quantization" in settings.engine_arguments, mixture=mixture
            ),
            adapters=adapters,
            now=now,
        )
        self._core = core
        if settings.engine_arguments.get("enable_sleep_mode"):
            self.memory = VllmMemory(core, self._requeue_all)
        self._scores: tuple[NDArray[Any], NDArray[Any]] | None = None  # of the given tokens under way
        self._shape = DecoderConfig.from_pretrained(Path(settings.model_path)) if settings.return_experts else None
        core.name_version(settings.version)
        self._register_adapters()

    # --- requests to vLLM -------------------------------------------------------------------------------------

    def _submit(self, entry: VllmRequest) -> None:
        self._tickets += 1
        ticket = f"{self._core.updates}-{self._tickets}"
        revision = self._choose_revision(entry)
        try:
            entry.handle = self._core.add(
                ticket,
                entry.prompt + entry.response,
                _parameters(entry, self._may_sample(entry), self._core.own_sampling, self.bias),
                salt=self._salt if revision is None else revision.label,
                priority=entry.priority,
                arrival=entry.arrival,
                adapter=None if revision is None else revision.handle,
            )
        except ValueError as error:  # vLLM's own refusal of one request
            self._end(entry, "error", str(error), refused=True)
            return
        self._note_submitted(entry, ticket)

    @property
    def _salt(self) -> str:
        """Cache salt of the current update. Versions can repeat, update numbers don't."""
        return f"update {self._core.updates}"

    def _withdraw(self, entries: Sequence[VllmRequest]) -> None:
        """Abort requests in vLLM; they keep the tokens sampled so far."""
        self._core.abort([request.ticket for request in entries])
        for request in entries:
            self._forget_ticket(request)

    # --- one step -------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        self._absorb(self._core.step())

    def _absorb(self, outputs: Sequence[StepOutput]) -> None:
        """Add a step's outputs to their requests."""
        generated_before = self._generated
        for output in outputs:
            request = self._submitted.get(output.ticket)
            if request is not None:
                self._prefilled += output.computed_tokens
                self._note_preemptions(request)
                if output.experts is not None and self._shape is not None:
                    request.add_rows(_expert_rows(output.experts, self._shape))
                version = output.version if request.revision is None else request.revision.version
                self._append_tokens(request, output.ids, output.logprobs, version, output.ended)
            elif output.prompt_scores is not None:
                self._scores = output.prompt_scores
        self._steps += self._generated > generated_before

    def _note_preemptions(self, entry: VllmRequest) -> None:
        """Count the preemptions of a request by vLLM since its last token."""
        new_preemptions = entry.handle.num_preemptions - entry.preempted
        if new_preemptions > 0:
            self._note_recomputed(entry)
            entry.preempted += new_preemptions
            self._preemptions += new_preemptions
            self._prefilled += entry.tokens

    # --- weights --------------------------------------------------------------------------------------------

    def _apply_model(self, published: PublishedWeights, mode: UpdateMode) -> AppliedWeights:
        old_paused_s = self._paused_s
        with self._drained():
            fetch_s = self._core.update(published)
            running_requests = self._set_aside()
            self.version = published.version
            if mode == "recompute":
                self._core.void_kv()
            reprefilled_tokens = self._cross_update(running_requests, mode)
            self._prefilled += reprefilled_tokens
            for request in running_requests:
                if mode == "recompute":
                    request.preempted += 1  # vLLM counts it as a preemption
                elif request.ticket:
                    # If it is preempted later, it must not find its own blocks of the older weights, which are cached
                    # under the salt that it came with.
                    request.handle.skip_reading_prefix_cache = True
            probe_due = self._probe_due(self._core.updates)
            if probe_due and (module_difference := self._core.differing_module()):
                self._break(module_difference)
        if probe_due:
            self._probe_sequence()
        self._note_idleness()
        return AppliedWeights(
            version=published.version,
            fetch_s=fetch_s,
            pause_s=self._paused_s - old_paused_s,
            in_flight=len(running_requests),
            reprefilled_tokens=reprefilled_tokens,
        )

    def _set_aside(self) -> list[VllmRequest]:
        """Return the requests that keep their KV through an update. Requests in vLLM without a token or without KV go
        back to waiting: they begin under the new weights and must not find KV of the old ones."""
        tickets = self._core.running
        kept_requests = [req for ticket, req in self._submitted.items() if req.sampled and ticket in tickets]
        returned_requests = [req for ticket, req in self._submitted.items() if not (req.sampled and ticket in tickets)]
        for req in returned_requests:
            self._note_preemptions(req)
            if req.unsent:
                self._emit(req)
        self._take_back(returned_requests)
        return kept_requests

    def _probe_sequence(self) -> None:
        """Compare log-probabilities of a random sequence, computed by vLLM's whole path, with the reference."""
        ids, delta_index = probe_ids(self._core.updates, self._vocabulary, self.context_tokens), len(self._deltas)
        expected_logprobs = self._core.reference_logprobs(ids)
        if difference := compare(self._sequence_logprobs(ids, None), expected_logprobs, self._precision).wrong:
            hint_text = "though no module of its own differs: attention, rotary embedding or configuration"
            self._break(f"{difference}, {hint_text}", delta_index)

    def _prompt_logprobs(self, ids: Sequence[int], top: int, revision: VllmRevision | None) -> PromptLogprobs:
        self._scores, delta_index = None, len(self._deltas)
        self._tickets += 1
        ticket, cache_salt = f"probe-{self._tickets}", self._salt if revision is None else revision.label
        adapter, parameters = None if revision is None else revision.handle, _prompt_parameters(top)
        try:
            self._core.add(ticket, ids, parameters, salt=cache_salt, priority=_FIRST, arrival=0, adapter=adapter)
        except ValueError as error:
            raise ConfigurationError(f"prompt: {error}") from None
        started_s, step_limit = self._now(), _IDLE_STEPS + len(ids)
        for _ in range(step_limit):
            self._absorb(self._core.step())
            if self._scores is not None:
                break
        self._busy_s += self._now() - started_s
        if self._scores is None:
            self._break(f"given tokens were not computed within {step_limit} steps", delta_index)
        scores = PromptLogprobs.unscored(self.version if revision is None else revision.version, len(ids), top)
        top_ids_lk, logprobs_lk = cast("Any", self._scores)
        scores.logprobs[1:] = logprobs_lk[:, 0]
        scores.top_ids[1:], scores.top_logprobs[1:] = top_ids_lk[:, 1 : 1 + top], logprobs_lk[:, 1 : 1 + top]
        return scores

    @contextmanager
    def _drained(self) -> Iterator[None]:
        with self.paused():
            self._absorb(self._core.drain())
            yield

    def _requeue_all(self) -> None:
        """Return every request from vLLM to waiting, with its tokens."""
        with self._drained():
            self._requeue(list(self._submitted.values()))

    def _load_revision(self, label: str, folder: Path) -> Any:
        try:
            return self._core.add_adapter(label, folder)
        except Exception as error:  # vLLM's refusals of an adapter have no common type
            self._break(f"it can't load an adapter: {error}")

    def _unload_revision(self, revision: VllmRevision) -> None:
        self._core.remove_adapter(revision.handle)

    # --- statistics -----------------------------------------------------------------------------------------

    def statistics(self) -> EngineStatistics:
        """See `Engine.statistics`; KV in whole blocks."""
        running_count = sum(ticket in self._submitted for ticket in self._core.running)
        return self._statistics(running_count, self._core.kv_used_tokens, self._core.kv_capacity_tokens)


class VllmMemory:
    """vLLM's sleep mode, level 1: its weights go to host memory, its KV is discarded and recomputed from the
    requests' tokens. It has not been run on a GPU yet, and needs one."""

    def __init__(self, core: VllmCore, renew_all: Callable[[], None]) -> None:
        self.directory: str | None = None  # unused: vLLM keeps its weights in host memory
        self.offloaded = False
        self._core, self._requeue_all = core, renew_all

    def offload(self) -> MemoryMove:
        """See `Memory.offload`."""
        if self.offloaded:
            return MemoryMove(moved_bytes=0, seconds=0.0)
        started_s, initial_bytes = time.perf_counter(), used_bytes()
        self._requeue_all()
        self._core.sleep()
        self.offloaded, freed = True, initial_bytes - used_bytes()
        return MemoryMove(moved_bytes=max(0, freed), seconds=time.perf_counter() - started_s, freed_bytes=freed)

    def onload(self) -> MemoryMove:
        """See `Memory.onload`."""
        started_s = time.perf_counter()
        if self.offloaded:
            self._core.wake_up()
            self.offloaded = False
        return MemoryMove(moved_bytes=0, seconds=time.perf_counter() - started_s, onload=True)


def _parameters(entry: EngineRequest, max_tokens: int, own_sampling: bool, bias: dict[int, float]) -> Any:
    """Make vLLM's SamplingParams of a request that may still sample ``max_tokens``."""
    from vllm import SamplingParams  # pyright: ignore[reportAttributeAccessIssue]
    from vllm.sampling_params import StructuredOutputsParams

    sampling = entry.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # stop_token_ids has all tokens that end a response
        logprobs=0,  # of the sampled token alone
        detokenize=False,
        # With a seed, vLLM's GPU sampler draws from (seed, index of the token), too.
        seed=None if own_sampling else sampling.seed & 0x7FFFFFFFFFFFFFFF,
        routed_experts_prompt_start=entry.rows,
        extra_args={SEED: sampling.seed} if own_sampling else None,
        logit_bias=bias or None,
        structured_outputs=StructuredOutputsParams(grammar=sampling.grammar) if sampling.grammar else None,
        skip_clone=True,
    )


def _expert_rows(experts: NDArray[Any], shape: DecoderConfig) -> TokenRows:
    """Make rows of vLLM's experts [N, layers, K], which have all layers, those without experts too. Written for vLLM
    0.32, and not run yet: its V2 model runner alone returns them, on GPUs."""
    assert shape.routing is not None
    sparse_experts = experts[:, list(shape.sparse_layers)]
    return TokenRows.of(sparse_experts.reshape(len(sparse_experts), -1), shape.routing.item_bytes)


def _prompt_parameters(top: int) -> Any:
    from vllm import SamplingParams  # pyright: ignore[reportAttributeAccessIssue]

    return SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=top, logprobs=0, ignore_eos=True, detokenize=False
    )
