"""The vLLM engine: vLLM's scheduler and model, in this process, behind the interface of `engine.py`."""
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

_FIRST = -(1 << 60)  # the probe's priority: before all others
_PROBE_STEPS = 100  # within which the probe must be through


class VllmEngine(VllmRequests):
    """Generates for many requests at once with a `VllmCore`; see `TorchEngine` for what its methods promise.

    Differences: KV is counted in vLLM's blocks; a preempted request is computed again by vLLM's own rules (of several
    it takes the one with the highest priority number, then the youngest).

    An update that samples from anything else than the published weights raises WeightsMismatch, and the engine samples
    no more: neither does it know what it would sample from.
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
        """``core`` is the engine's alone while it lives. ``probe_every_updates``: 0 never probes."""
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
        self._probe_logprobs: list[float] | None = None  # of the probe that is on its way
        self._broken = False  # it computes with unknown weights
        self._prefilled = self._preemptions = self._steps = 0
        self._busy_s = 0.0
        core.name_version(version)

    # --- what vLLM is told ------------------------------------------------------------------------------------

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
        """Versions can repeat; updates don't."""
        return f"update {self._core.updates}"

    def _withdraw(self, entries: Sequence[VllmRequest]) -> None:
        """Take requests back from vLLM; what it sampled for them stays with them."""
        self._core.abort([entry.ticket for entry in entries])
        for entry in entries:
            self._forget_ticket(entry)

    # --- one step -------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Sample one token for every running request. False when there is nothing to do."""
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
        """Take over what a step gave."""
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
        """Whether vLLM has taken the request's KV since its last token."""
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
        """Fetch, verify and apply a version (DESIGN rule 4), then prove that it is what the engine samples from.

        Raises WeightsCorrupt, with nothing changed, or WeightsMismatch.
        """
        before_s = self._paused_s
        with self.paused():
            self._absorb(self._core.drain())
            try:
                fetch_s, _ = self._core.update(published)
            except WeightsMismatch:  # its ranks compute with different weights
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
                    # Should it be preempted later, its KV is computed anew: its own blocks of older weights would be
                    # found under the salt it came with.
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
        """The requests whose KV goes on. Those vLLM has, but without a token or without KV, are taken back: they begin
        under the new weights, and must not find the old ones' KV."""
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
        """Ask for the log-probabilities of a random sequence, through everything that samples."""
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
        """``since``: the deltas from there on may hold what was sampled from other weights."""
        self._broken = True
        error = f"vLLM does not compute with the published weights of version {self.version}: {what}"
        self._void_given(error, since)
        raise WeightsMismatch(error)

    # --- statistics -----------------------------------------------------------------------------------------

    def statistics(self) -> EngineStatistics:
        """Counters since the start, and the present state; KV in whole blocks."""
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
        ignore_eos=True,  # what ends a response is ours to say
        logprobs=0,  # of the sampled token alone
        detokenize=False,
        # vLLM's GPU sampler too draws from (seed, index of the token), where it is given a seed.
        seed=None if own_sampling else how.seed & 0x7FFFFFFFFFFFFFFF,
        extra_args={SEED: how.seed} if own_sampling else None,
        skip_clone=True,
    )


def _probe_parameters() -> Any:
    from vllm import SamplingParams  # pyright: ignore[reportAttributeAccessIssue]

    return SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=0, logprobs=0, ignore_eos=True, detokenize=False
    )
