"""An existing `vllm serve` behind the interface `Engine`: the replica's process has no model, it calls the server.

Written for vLLM 0.32. Requests go to ``/inference/v1/generate`` (token ids in and out), one connection each, all read
without blocking by one thread. New weights are written as a safetensors file into a folder that the server reads too,
and loaded from there while the server is paused.

A server doesn't report which requests it preempted, nor, before a request's last chunk, which version sampled a token.
Tokens are labelled by their time of arrival: nothing is sampled between the answers to ``/pause`` and ``/resume``, and
all streams are read just before the latter. The labels are compared with the last chunk's own ``weight_versions``.
"""

from __future__ import annotations

import selectors
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.torch import save_file
from torch import Tensor

from headway.control.logprob_limits import compare, precision_of
from headway.generator.engines.sampling import counter_bits
from headway.generator.engines.settings import EngineSettings
from headway.generator.engines.vllm.adapters import LABELS, VllmAdapters, VllmRevision
from headway.generator.engines.vllm.base_engine import VllmRequest, VllmRequests
from headway.generator.engines.vllm.reference import PublishedModel
from headway.generator.engines.vllm.server_client import EventStream, ServerError, VllmServer, require_engine
from headway.generator.engines.vllm.server_info import UPDATING, ServerInfo
from headway.generator.engines.vllm.wire import Chunk, CompletionChunk, CompletionSpan, Logprob, content, score_of
from headway.records.errors import ConfigurationError
from headway.records.generation import (
    AppliedWeights,
    EngineStatistics,
    FinishReason,
    PromptLogprobs,
    PublishedWeights,
    UpdateMode,
    probe_ids,
)
from headway.tokens.tokenizer import Tokenizer
from headway.weights.shared_memory import Subscriber
from headway.weights.slots import SHARED_MEMORY, exchange_folder, reap_folders

_WAIT_S = 0.02  # a tick's longest wait for tokens; calls are served between ticks
_WITHDRAWN_S = 10.0  # the server's time to end an aborted request, before its connection is closed
_ABORT_AGAIN_S = 0.25  # interval of repeating an abort, which may overtake its request
_NO_LOGPROB = -9999.0  # the server's value for log-probabilities that aren't finite
_PROBE_TEMPERATURE = 0.5  # raw and processed log-probabilities differ there
_NEXT_TOKEN = 1e-2  # nats: allowed difference of the probe's sampled token in float32; ten times the sequence's
_EMBEDDING = "model.embed_tokens.weight"
_ENDINGS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class _OpenStream:
    """A request's open stream, and the versions that its tokens were labelled with."""

    def __init__(self, stream: EventStream) -> None:
        self.stream = stream
        self.spans: list[list[int]] = []  # [version, tokens] as labelled here

    def add(self, version: int, tokens: int) -> None:
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1][1] += tokens
        elif tokens:
            self.spans.append([version, tokens])


class VllmServerEngine(VllmRequests):
    """Generates with a server; see `TorchEngine` for what its methods promise.

    Differences: a ``step`` takes the tokens that have arrived; a resumed request gets other random numbers than it
    would have had uninterrupted; preemptions are counted in total, not by request. When the server is gone, the
    process ends, and its successor reconnects.
    """

    def __init__(
        self,
        server: VllmServer,
        served: ServerInfo,
        model: PublishedModel,
        settings: EngineSettings,
        tokenizer: Tokenizer | None = None,
        adapters: VllmAdapters | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``model``: the weights to load into the server now; with ``adapters`` those that it has been started with.

        Raises WeightsMismatch if the server computes with other weights, ConfigurationError for an adapter that it
        doesn't compute, OSError when it is gone.
        """
        super().__init__(
            settings,
            name=server.address,
            context_tokens=served.context_tokens,
            vocabulary=model.shape.vocabulary_size,
            tokenizer=tokenizer,
            truncates=False,
            precision=precision_of(served.dtype, quantised=served.quantised, mixture=model.shape.has_experts),
            adapters=adapters,
            now=now,
        )
        self._server = server
        self._served = served
        self._model = model
        self._tied = model.shape.tied  # the head is the embedding
        self._exchange = Path(settings.exchange_directory or SHARED_MEMORY)
        self._subscriber = Subscriber()
        self._selector = selectors.DefaultSelector()
        self._withdrawing: set[str] = set()  # tickets
        self._instance_id = uuid.uuid4().hex[:12]  # tells this process's requests from a predecessor's
        self._updates = self._probes = 0
        self._gone = ""  # why the server isn't the one connected to any more
        self._reprefilled = 0
        reap_folders(self._exchange)  # left by a predecessor that was killed in an update
        if adapters is None:
            with self._written() as folder:
                self._load(folder, settings.version, clear=True)
        else:
            self._load(None, settings.version, clear=True)
            self._remove_adapters()
        self._probe()
        self._register_adapters()
        self._initial_counters = served.counters(server)

    # --- requests to vLLM -------------------------------------------------------------------------------------

    def _submit(self, entry: VllmRequest) -> None:
        self._tickets += 1
        ticket = f"{self._instance_id}-{self._tickets}"
        sampling, revision = entry.sampling, self._choose_revision(entry)
        stream = self._server.stream(
            "/inference/v1/generate",
            {
                "request_id": ticket,
                **self._weights_named(revision),
                "token_ids": [*entry.prompt, *entry.response],
                "sampling_params": {
                    "temperature": sampling.temperature,
                    "max_tokens": self._may_sample(entry),
                    "stop_token_ids": sampling.stop_token_ids,
                    "ignore_eos": True,  # stop_token_ids has all tokens that end a response
                    "logprobs": 0,  # of the sampled token alone
                    "detokenize": False,
                    "seed": _seed(sampling.seed, len(entry.response)),
                    **({"logit_bias": self.bias} if self.bias else {}),
                    **({"structured_outputs": {"grammar": sampling.grammar}} if sampling.grammar else {}),
                },
                "stream": True,
                "priority": entry.priority,
            },
        )
        entry.handle = _OpenStream(stream)
        self._note_submitted(entry, ticket)
        self._selector.register(stream, selectors.EVENT_READ, entry)

    @property
    def _salt(self) -> str:
        """Cache salt of this process's current update: versions can repeat, and a server outlives its clients."""
        return f"{self._instance_id} update {self._updates}"

    def _weights_named(self, revision: VllmRevision | None) -> dict[str, str]:
        """Return the fields of a request that name the weights to compute it with, and the KV that it may use."""
        return (
            {"cache_salt": self._salt} if revision is None else {"cache_salt": revision.label, "model": revision.label}
        )

    def _withdraw(self, entries: Sequence[VllmRequest]) -> None:
        """See `VllmRequests`. Waits for each request's last tokens, up to `_WITHDRAWN_S`."""
        self._withdrawing |= {request.ticket for request in entries}
        deadline_s, next_abort_s = self._now() + _WITHDRAWN_S, 0.0
        while remaining_tickets := [request.ticket for request in entries if request.ticket]:
            if self._now() >= deadline_s:
                break
            if self._now() >= next_abort_s:
                self._abort_tickets(remaining_tickets)
                next_abort_s = self._now() + _ABORT_AGAIN_S
            self._pump()
        for request in entries:
            if request.ticket:
                self._forget_ticket(request)

    def _drop(self, entry: VllmRequest) -> None:
        """Close the request's stream: the server aborts it when the client disconnects. One with an adapter is aborted
        before, since a LoRA that is removed while a request has it ends vLLM's engine."""
        if entry.revision is not None:
            self._abort_tickets([entry.ticket])
        self._forget_ticket(entry)

    def _abort_tickets(self, tickets: Sequence[str]) -> None:
        request_ids = [f"generate-tokens-{ticket}" for ticket in tickets]
        with suppress(ServerError):  # `_withdraw` repeats it, and closes the connections in the end
            self._server.post("/inference/v1/abort_requests", {"request_ids": request_ids})

    def _forget_ticket(self, entry: VllmRequest) -> None:
        self._selector.unregister(entry.handle.stream)
        entry.handle.stream.close()
        self._withdrawing.discard(entry.ticket)
        super()._forget_ticket(entry)

    # --- outputs of vLLM ----------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Take the tokens that have arrived, waiting briefly for some. Returns False when there is nothing to do.

        Raises OSError when the server is gone, or was replaced: in that case once the voiding deltas were taken."""
        if self._gone and not self._broken:
            if self._deltas:
                return False
            raise ConnectionError(self._gone)
        try:
            return super().step() and not self._gone
        except OSError as error:
            raise ConnectionError(f"{error}{self._server.last_output()}") from error

    def _pump(self, wait_s: float = _WAIT_S) -> None:
        """Read all streams with data, waiting up to ``wait_s`` for the first."""
        for selector_key, _ in self._selector.select(wait_s):
            request: VllmRequest = selector_key.data
            if not request.ticket:  # ended by another request's events
                continue
            try:
                events = request.handle.stream.read()
            except ServerError as error:
                if error.status == 404 and request.revision is not None:
                    raise ConnectionError(f"the server was restarted, and has no adapters: {error}") from error
                self._forget_ticket(request)
                self._end(request, "error", str(error), refused=error.status in (400, 422))
                continue
            for event in events:
                if request.ticket:  # else ended by an earlier event
                    self._absorb(request, msgspec.json.decode(event, type=Chunk))

    def _absorb(self, entry: VllmRequest, chunk: Chunk) -> None:
        if not chunk.choices:
            if chunk.error is not None:
                require_engine(chunk.error.message)
                self._forget_ticket(entry)
                self._end(entry, "error", f"the server: {chunk.error.message}")
            return
        choice = chunk.choices[0]
        token_ids = choice.token_ids or []
        logprobs = [token.logprob if token.logprob > _NO_LOGPROB else float("nan") for token in content(choice)]
        entry.handle.add(self._model_version, len(token_ids))
        version = self._model_version if entry.revision is None else entry.revision.version
        ending = None if choice.finish_reason is None else _ENDINGS.get(choice.finish_reason, "error")
        error_text = ""
        if ending is not None and (difference := self._mislabelled(entry.handle.spans, choice.weight_versions or [])):
            if self._gone:
                self._void_submitted(difference)
            else:
                self._end_void(entry, difference)
            return
        if ending == "abort" and entry.ticket in self._withdrawing:
            self._append_tokens(entry, token_ids, logprobs, version, None)
            if entry.ticket:
                self._forget_ticket(entry)
            return
        if ending in ("abort", "error"):
            ending, error_text = "error", f"the server ended it: {choice.finish_reason}"
        self._append_tokens(entry, token_ids, logprobs, version, ending, error_text)

    def _mislabelled(self, spans: Sequence[Sequence[int]], reported: Sequence[CompletionSpan]) -> str:
        """Compare a request's version labels with the server's; returns the difference, or "". A version that this
        process never loaded marks the server as gone: it was restarted, or serves another run."""
        server_spans = [(span.version, span.end - span.start) for span in reported]
        if server_spans == [(self._label(version), tokens) for version, tokens in spans]:
            return ""
        foreign = [name for name, _ in server_spans if not name.startswith(self._label(""))]
        if not foreign:
            return f"its tokens were labelled with versions {spans}, the server reports {server_spans}"
        self._gone = (
            f"{self._server.address} samples from weights {foreign[0]!r}, which this run did not publish: it was "
            "restarted, or serves another run too"
        )
        return self._gone

    def _label(self, version: int | str) -> str:
        """Name of a version on the server, unique to this process."""
        return f"{self._instance_id}:{version}"

    # --- weights --------------------------------------------------------------------------------------------

    def _apply_model(self, published: PublishedWeights, mode: UpdateMode) -> AppliedWeights:
        """Verify and write a version while the server keeps decoding, have it loaded, and probe that the server samples
        from it. Raises WeightsCorrupt, with nothing changed, or WeightsMismatch."""
        started_s = self._now()
        tensors = self._subscriber.attach(published)
        fetch_s = self._now() - started_s
        self._model.take(tensors)
        old_paused_s = self._paused_s
        with self._exit_if_gone(ServerError), self._written() as folder:
            crossing_count, reprefilled_tokens = self._update(folder, published.version, mode)
            if self._probe_due(self._updates):
                self._probe()
        self._note_idleness()
        return AppliedWeights(
            version=published.version,
            fetch_s=fetch_s,
            pause_s=self._paused_s - old_paused_s,
            in_flight=crossing_count,
            reprefilled_tokens=reprefilled_tokens,
        )

    def _update(self, folder: Path, version: int, mode: UpdateMode) -> tuple[int, int]:
        """Update a paused server. Returns (requests that cross the update, recomputed tokens)."""
        with self.paused():
            self._server.post(f"/pause?mode=keep&clear_cache={str(mode == 'recompute').lower()}")
            self._pump(0.0)
            # Requests without a token begin under the new weights and must not find KV of the old ones.
            self._take_back([request for request in self._submitted.values() if not request.sampled])
            running_requests = list(self._submitted.values())
            reprefilled_tokens = self._cross_update(running_requests, mode)
            self._load(folder, version)
        self._reprefilled += reprefilled_tokens
        return len(running_requests), reprefilled_tokens

    def _load(self, folder: Path | None, version: int, *, clear: bool = False) -> None:
        """Have a paused server load ``folder`` (None: nothing) and resume; ``clear``: pause it first, aborting its
        requests."""
        if clear:
            self._server.post("/pause?mode=abort&clear_cache=true")
        try:
            if folder is not None:
                self._rpc("reload_weights", kwargs={"weights_path": str(folder)})
        except ServerError as error:
            if error.status > 500:  # not from the load: a proxy's error, or a server shutting down
                raise
            self._break(f"it can't load {folder}: {error}; it must see that folder, and serve that model")
        self._server.post("/update_weight_version", {"new_version": self._label(version)})
        self._pump(0.0)  # late tokens of the old version
        self.version = self._model_version = version
        self._updates += 1
        self._server.post("/resume")

    def _rpc(self, method: str, **arguments: Any) -> Any:
        """Call a method of the server's workers; returns all ranks' ``results``."""
        return self._server.post("/collective_rpc", {"method": method, **arguments})

    @contextmanager
    def _written(self) -> Iterator[Path]:
        """Write the model's tensors into a folder of Hugging Face's layout, removed after the block."""
        with exchange_folder(self._exchange) as folder:
            save_file(self._checkpoint(), folder / "model.safetensors")
            yield folder

    def _checkpoint(self) -> dict[str, Tensor]:
        tensors = {name: tensor.contiguous() for name, tensor in self._model.tensors()}
        if self._tied and _EMBEDDING in tensors:
            # Write the tied tensor twice: on a CPU vLLM's head has its own packed copy, which is renewed only when
            # ``lm_head.weight`` is loaded.
            tensors["lm_head.weight"] = tensors[_EMBEDDING].clone()
        return tensors

    # --- adapters -------------------------------------------------------------------------------------------

    def _load_revision(self, label: str, folder: Path) -> Any:
        with self._exit_if_gone(ServerError):
            loaded_ids = self._adapter_ids()
            try:
                self._server.post("/v1/load_lora_adapter", {"lora_name": label, "lora_path": str(folder)})
            except ServerError as error:
                self._break(f"it can't load {folder}: {error}; it must see that folder, and be started with {UPDATING}")
            return next(iter(self._adapter_ids() - loaded_ids))

    def _unload_revision(self, revision: VllmRevision) -> None:
        with self._exit_if_gone(ServerError):
            self._server.post("/v1/unload_lora_adapter", {"lora_name": revision.label})
            self._rpc("remove_lora", args=[revision.handle])  # the route itself leaves it in the engine

    def _adapter_ids(self) -> set[int]:
        """Ids of the LoRAs in the server's engine."""
        return set(self._rpc("list_loras")["results"][0])

    def _remove_adapters(self) -> None:
        """Unload the adapters that a predecessor left."""
        models = msgspec.json.decode(self._server.get("/v1/models"))["data"]
        for label in [model["id"] for model in models if model["id"].startswith(LABELS)]:
            self._server.post("/v1/unload_lora_adapter", {"lora_name": label})
        for adapter_id in self._adapter_ids():
            self._rpc("remove_lora", args=[adapter_id])

    @contextmanager
    def _drained(self) -> Iterator[None]:
        self._pump(0.0)  # the server goes on in the block
        yield

    # --- probes ---------------------------------------------------------------------------------------------

    def _probe(self) -> None:
        """Compare the server's log-probabilities of a random sequence, and of a token sampled after it, with the
        reference."""
        token_ids = probe_ids(self._updates, self._vocabulary, self.context_tokens)
        reply = self._asked(token_ids, 0, None)
        rows, sampled_token = zip(reply.prompt_logprobs[1:], token_ids[1:], strict=True), content(reply.choices[0])[0]
        server_logprobs = [score_of(row, token, 0)[0] for row, token in rows if row is not None]
        if difference := compare(server_logprobs, self._model.logprobs(token_ids), self._precision).wrong:
            self._break(f"{difference} (it computes in {self._served.dtype})")
        self._probe_temperature(token_ids, sampled_token)

    def _prompt_logprobs(self, ids: Sequence[int], top: int, revision: VllmRevision | None) -> PromptLogprobs:
        with self._exit_if_gone(ServerError):
            try:
                reply = self._asked(ids, top, revision)
            except ServerError as error:
                if error.status not in (400, 422):
                    raise
                raise ConfigurationError(f"prompt: {error}") from None
            spans = reply.choices[0].weight_versions or []
            if foreign := {span.version for span in spans} - {self._label(self._model_version)}:
                raise ConnectionError(f"it computes with weights {foreign.pop()!r}, which this run did not publish")
        scores = PromptLogprobs.unscored(self.version if revision is None else revision.version, len(ids), top)
        for position, (row, token) in enumerate(zip(reply.prompt_logprobs, ids, strict=True)):
            if row is not None:
                scores.fill(position, *score_of(row, token, top))
        return scores

    def _asked(self, ids: Sequence[int], top: int, revision: VllmRevision | None) -> CompletionChunk:
        """Have the server compute ``ids``, and sample a token after them."""
        self._probes += 1
        body = {
            "request_id": f"{self._instance_id}-probe-{self._probes}",
            "token_ids": list(ids),
            **self._weights_named(revision),
            "sampling_params": {
                "temperature": _PROBE_TEMPERATURE,
                "max_tokens": 1,
                "prompt_logprobs": top,
                "logprobs": 0,
                "ignore_eos": True,
                "detokenize": False,
                "seed": self._probes,
            },
            "priority": -(1 << 60),
        }
        return msgspec.convert(self._server.post("/inference/v1/generate", body), CompletionChunk)

    def _probe_temperature(self, ids: Sequence[int], sampled: Logprob) -> None:
        all_ids = [*ids, sampled.token_id]
        logprob_at_one, expected_logprob = (self._model.logprobs(all_ids, t)[-1] for t in (1.0, _PROBE_TEMPERATURE))
        if abs(sampled.logprob - expected_logprob) <= max(_NEXT_TOKEN, 0.5 * abs(logprob_at_one - expected_logprob)):
            return
        self._break(
            f"the log-probability of a token sampled at T = {_PROBE_TEMPERATURE} is {sampled.logprob:.4g}, not "
            f"{expected_logprob:.4g}: start it with --logprobs-mode processed_logprobs"
        )

    # --- statistics -----------------------------------------------------------------------------------------

    @contextmanager
    def _exit_if_gone(self, *others: type[Exception]) -> Iterator[None]:
        """Exit the process when a call inside the block finds no server, or raises ``others``: the restarted replica
        begins from a known state."""
        try:
            yield
        except (OSError, *others) as error:
            state_text = "is unreachable" if isinstance(error, OSError) else "failed"
            raise SystemExit(f"the server {state_text}: {error}{self._server.last_output()}") from error

    def statistics(self) -> EngineStatistics:
        """See `Engine.statistics`; KV, preemptions, prefills and steps are the server's."""
        with self._exit_if_gone():
            fresh = self._served.counters(self._server)
        initial, capacity = self._initial_counters, self._served.kv_capacity_tokens
        self._prefilled = self._reprefilled + fresh.prefilled - initial.prefilled
        self._preemptions = fresh.preemptions - initial.preemptions
        self._steps = fresh.steps - initial.steps
        return self._statistics(min(len(self._submitted), fresh.running), round(fresh.kv_usage * capacity), capacity)


def _seed(seed: int, sampled: int) -> int:
    """Return the seed for a request that has ``sampled`` tokens, 63 bits. vLLM restarts a request's random numbers when
    it is resubmitted, so a resumed one needs another seed."""
    if not sampled:
        return seed & 0x7FFFFFFFFFFFFFFF
    seed_array = np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
    return int(counter_bits(seed_array, np.array([sampled], dtype=np.int64))[0] >> np.uint64(1))
