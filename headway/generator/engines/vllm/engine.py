"""The vLLM engine: vLLM's scheduler and model in this process, behind the interface `Engine`."""
# pyright: reportMissingImports=false
# vLLM is installed where it is used, not where this is type-checked.

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from headway.generator.engines.requests import EngineRequest
from headway.generator.engines.vllm.core import SEED, CoreRequest, Sampled, VllmCore
from headway.generator.engines.vllm.reference import PROBE, compare, probe_ids
from headway.generator.engines.vllm.requests import VllmRequest, VllmRequests
from headway.records.errors import WeightsMismatch
from headway.records.generation import AppliedWeights, EngineStatistics, PublishedWeights, UpdateMode
from headway.tokens.tokenizer import Tokenizer

_FIRST = -(1 << 60)  # priority of the probe: before all requests
_PROBE_STEPS = 100  # limit of steps for a probe


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
        *,
        slots: int,
        max_context_tokens: int,
        vocabulary: int,
        tokenizer: Tokenizer | None = None,
        version: int = 0,
        dtype: str = "float32",
        quantised: bool = False,
        probe_every_updates: int = 1,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """The engine owns ``core``. ``probe_every_updates``: 0 never probes."""
        super().__init__(
            slots=slots,
            context_tokens=min(max_context_tokens, core.context_tokens),
            vocabulary=vocabulary,
            tokenizer=tokenizer,
            truncates=core.own_sampling,
            now=now,
        )
        self.version = version
        self._core = core
        self._dtype = dtype
        self._quantised = quantised
        self._probe_every_updates = probe_every_updates
        self._probe_logprobs: list[float] | None = None  # result of the probe under way
        self._broken = False  # vLLM computes with unknown weights
        self._prefilled = self._preemptions = self._steps = 0
        self._busy_s = 0.0
        core.name_version(version)

    # --- requests to vLLM -------------------------------------------------------------------------------------

    def _give(self, entry: VllmRequest) -> None:
        self._tickets += 1
        ticket = f"{self._core.updates}-{self._tickets}"
        try:
            entry.own = self._core.add(
                CoreRequest(
                    ticket=ticket,
                    prompt_ids=entry.prompt + entry.response,
                    parameters=_parameters(entry, self._may_sample(entry), self._core.own_sampling),
                    priority=entry.priority,
                    arrival=entry.arrival,
                    salt=self._salt,
                )
            )
        except ValueError as error:  # vLLM's own refusal of one request
            self._end(entry, "error", str(error), refused=True)
            return
        self._now_given(entry, ticket)

    @property
    def _salt(self) -> str:
        """Cache salt of the current update. Versions can repeat, update numbers don't."""
        return f"update {self._core.updates}"

    def _withdraw(self, entries: Sequence[VllmRequest]) -> None:
        """Abort requests in vLLM; they keep the tokens sampled so far."""
        self._core.abort([entry.ticket for entry in entries])
        for entry in entries:
            self._forget_ticket(entry)

    # --- one step -------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Sample one token for every running request. Returns False when there is nothing to do."""
        if self._broken:
            return False
        self._give_waiting()
        if not self._given:
            return False
        started = self._now()
        self._absorb(self._core.step())
        self._busy_s += self._now() - started
        self._note_idleness()
        return True

    def _absorb(self, outputs: Sequence[Sampled]) -> None:
        """Add a step's outputs to their requests."""
        before = self._generated
        for output in outputs:
            entry = self._given.get(output.ticket)
            if entry is not None:
                self._extend(entry, output)
            elif output.prompt_logprobs is not None:
                self._probe_logprobs = output.prompt_logprobs
        self._steps += self._generated > before

    def _extend(self, entry: VllmRequest, output: Sampled) -> None:
        self._prefilled += output.computed_tokens
        self._note_preemptions(entry)
        self._gained(entry, output.ids, output.logprobs, output.version, output.ended)

    def _note_preemptions(self, entry: VllmRequest) -> None:
        """Count the preemptions of a request by vLLM since its last token."""
        times = entry.own.num_preemptions - entry.preempted
        if times > 0:
            if entry.unsent:
                self._emit(entry)  # those before had the old KV behind them
            entry.preempted += times
            entry.reprefilled = True
            self._preemptions += times
            self._prefilled += entry.tokens

    # --- weights --------------------------------------------------------------------------------------------

    def apply(self, published: PublishedWeights, mode: UpdateMode) -> AppliedWeights:
        """Fetch, verify and apply a version (DESIGN rule 4), then probe that vLLM samples from it.

        Raises WeightsCorrupt, with nothing changed, or WeightsMismatch.
        """
        before_s = self._paused_s
        with self.paused():
            self._absorb(self._core.drain())
            try:
                fetch_s, _ = self._core.update(published)
            except WeightsMismatch:  # the ranks have different weights
                self._broken = True
                raise
            running = self._set_aside()
            self.version = published.version
            reprefilled = 0
            if mode == "abort":
                parked = [entry for entry in running if entry.interruptible]
                self._withdraw(parked)
                for entry in parked:
                    self._end(entry, "abort")
            elif mode == "recompute":
                self._core.void_kv()
                for entry in running:
                    entry.preempted += 1  # vLLM counts it as a preemption
                    if entry.unsent:
                        self._emit(entry)  # those before had the old KV behind them
                    entry.reprefilled = True
                    reprefilled += entry.tokens
                self._prefilled += reprefilled
            if mode != "recompute":
                for entry in [entry for entry in running if entry.ticket]:
                    # If it is preempted later, it must not find its own blocks of the older weights, which are cached
                    # under the salt that it came with.
                    entry.own.skip_reading_prefix_cache = True
            probed = self._probe_every_updates > 0 and self._core.updates % self._probe_every_updates == 0
            if probed:
                self._probe_modules()
        if probed:
            self._probe_sequence()
        self._note_idleness()
        return AppliedWeights(
            version=published.version,
            fetch_s=fetch_s,
            pause_s=self._paused_s - before_s,
            in_flight=len(running),
            reprefilled_tokens=reprefilled,
        )

    def _set_aside(self) -> list[VllmRequest]:
        """Return the requests that keep their KV through an update. Requests in vLLM without a token or without KV go
        back to waiting: they begin under the new weights and must not find KV of the old ones."""
        running = self._core.running
        kept = [entry for ticket, entry in self._given.items() if entry.sampled and ticket in running]
        back = [entry for ticket, entry in self._given.items() if not (entry.sampled and ticket in running)]
        for entry in back:
            self._note_preemptions(entry)
            if entry.unsent:
                self._emit(entry)
        self._withdraw(back)
        for entry in back:
            self._waiting.push(entry)
        return kept

    def _probe_modules(self) -> None:
        found = self._core.differing_module()
        if found is not None:
            self._break(
                f"module {found['module']}: its output differs by {found['difference']:.2g} of the largest value, "
                f"allowed is {found['allowed']:.2g}"
            )

    def _probe_sequence(self) -> None:
        """Compare log-probabilities of a random sequence, computed by vLLM's whole path, with the reference."""
        ids = probe_ids(self._core.updates, self._vocabulary, self.context_tokens)
        expected = self._core.reference_logprobs(ids)
        self._probe_logprobs, before = None, len(self._deltas)
        self._core.add(
            CoreRequest(
                ticket=f"{PROBE}-{self._core.updates}",
                prompt_ids=ids,
                parameters=_probe_parameters(),
                priority=_FIRST,
                arrival=0,
                salt=self._salt,
            )
        )
        started = self._now()
        for _ in range(_PROBE_STEPS):
            self._absorb(self._core.step())
            if self._probe_logprobs is not None:
                break
        self._busy_s += self._now() - started
        if self._probe_logprobs is None:
            self._break(f"the probe was not served within {_PROBE_STEPS} steps", before)
        elif wrong := compare(self._probe_logprobs, expected, self._dtype, self._quantised):
            other = "though no module of its own differs: attention, rotary embedding or configuration"
            self._break(f"{wrong}, {other}", before)

    def _break(self, what: str, since: int | None = None) -> None:
        """Stop sampling and void all requests in vLLM. ``since``: first delta that may be of other weights.

        Raises WeightsMismatch."""
        self._broken = True
        error = f"vLLM does not compute with the published weights of version {self.version}: {what}"
        self._void_given(error, since)
        raise WeightsMismatch(error)

    # --- statistics -----------------------------------------------------------------------------------------

    def statistics(self) -> EngineStatistics:
        """Return the counters since the start, and the present state; KV in whole blocks."""
        running = sum(ticket in self._given for ticket in self._core.running)
        return EngineStatistics(
            version=self.version,
            running=running,
            waiting=len(self._open) - running,
            slots=self.slots,
            kv_used_tokens=self._core.kv_used_tokens,
            kv_capacity_tokens=self._core.kv_capacity_tokens,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            finished=self._finished,
            preemptions=self._preemptions,
            busy_s=self._busy_s,
            idle_s=self.idle_s,
            paused_s=self._paused_s,
            decode_steps=self._steps,
        )


def _parameters(entry: EngineRequest, max_tokens: int, own_sampling: bool) -> Any:
    """vLLM's SamplingParams of a request that may still sample ``max_tokens``."""
    from vllm import SamplingParams  # pyright: ignore[reportAttributeAccessIssue]

    how = entry.sampling
    return SamplingParams(
        temperature=how.temperature,
        top_p=how.top_p,
        top_k=how.top_k,
        max_tokens=max_tokens,
        stop_token_ids=list(how.stop_token_ids),
        ignore_eos=True,  # stop_token_ids has all tokens that end a response
        logprobs=0,  # of the sampled token alone
        detokenize=False,
        # With a seed, vLLM's GPU sampler draws from (seed, index of the token), too.
        seed=None if own_sampling else how.seed & 0x7FFFFFFFFFFFFFFF,
        extra_args={SEED: how.seed} if own_sampling else None,
        skip_clone=True,
    )


def _probe_parameters() -> Any:
    from vllm import SamplingParams  # pyright: ignore[reportAttributeAccessIssue]

    return SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=0, logprobs=0, ignore_eos=True, detokenize=False
    )
