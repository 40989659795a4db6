"""Records that cross the boundary between a rollout and a generator: requests, deltas, results, weights, statistics,
and the probes by which trainer and engine are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from headway.records.tokens import SAMPLED, IdSequence, LogprobSequence, TokenIds, TokenLogprobs, TokenRows, sampled

FinishReason = Literal["stop", "length", "abort", "error"]
PROBE_TOKENS = 32  # of the sequence that trainer and engines are compared by
_PROBE_KEY = 0x9E3779B97F4A7C15
LOWEST_TEMPERATURE = 1e-8  # beside 0: logits divided by less may leave the range of float32
# What a weight update does to requests in an engine (DESIGN rule 4); "finish": of an adapter, they end on its old
# weights. Before an update that drains, the pool empties the engine.
UpdateMode = Literal["keep", "recompute", "abort", "finish"]
POLICY_ADAPTER = "policy"  # the adapter that a run trains
BASE_MODEL = "base"  # the model without an adapter


class VersionSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A run of consecutive tokens sampled under one version of the weights."""

    version: int  # trainer version the engine had applied
    tokens: int  # how many consecutive tokens, >= 1


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True):
    """How one response is sampled. The defaults sample the plain softmax."""

    temperature: float = 1.0  # from LOWEST_TEMPERATURE on samples softmax(z/T); 0 takes the argmax
    top_p: float = 1.0  # nucleus mass in (0, 1]; 1 keeps all
    top_k: int = 0  # 0 keeps all
    max_tokens: int = 128  # response tokens, those of a resumed prefix included
    stop_token_ids: tuple[int, ...] = ()  # any of these ends the response (it is kept as its last token)
    stop: tuple[str, ...] = ()  # any of these strings in the decoded response ends it
    seed: int = 0  # key of the counter-based generator: (seed, position) -> one uniform number
    # What the response matches, as `tokens.grammar` reads it; "": anything. Where it may end, the tokenizer's stop
    # tokens are allowed, and end it.
    grammar: str = ""
    # Above 0: log-probabilities are over the set that each token was sampled among, and the sets of top-p and top-k are
    # returned as rows (`records.tokens.KEPT`); one of more ids ends the request. 0: over the full vocabulary.
    kept_sets: int = 0
    untempered: bool = False  # log-probabilities are those at temperature 1, whatever is sampled from; torch engine


class PartialResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a response so far: enough to continue it on another replica."""

    ids: IdSequence = TokenIds()  # [N] sampled token ids
    logprobs: LogprobSequence = TokenLogprobs()  # [N] behaviour log-probabilities (DESIGN rule 5)
    versions: tuple[VersionSpan, ...] = ()  # spans that cover the N tokens
    token_rows: dict[str, TokenRows] = {}  # by kind, of tokens from the request's rows_known on


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A model call: prompt, sampling parameters and scheduling hints."""

    request_id: str  # unique among open requests
    prompt_ids: IdSequence  # [P] ids of everything before the response
    sampling: SamplingParameters
    priority: int = 0  # lower is served first; rollouts use their group's admission index (oldest first)
    partial: PartialResponse = PartialResponse()  # tokens already sampled: continue after them
    interruptible: bool = True  # False: an "abort" update doesn't park it (limit of parkings reached)
    adapter: str = ""  # BASE_MODEL or an adapter's name; "": the policy in training, with its adapter if it has one
    session: str = ""  # requests of one name extend one another: routed to its KV; "": none
    oldest_version: int = 0  # replicas that lag behind others and have an older one don't sample it
    rows_known: int = 0  # tokens at the prompt's beginning whose rows aren't to be returned: earlier calls did


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Tokens a request gained since the last delta; all sampled under one version.

    They travel as plain bytes, which `TokenBlock.append` takes as they are.
    """

    request_id: str
    data: bytes = b""  # [N] new tokens and their behaviour log-probabilities (records.tokens.SAMPLED)
    version: int = -1  # version of these tokens (-1 when there are none)
    finish_reason: FinishReason | None = None  # set on the request's last delta
    error: str = ""  # cause, when finish_reason is "error"
    refused: bool = False  # ... caused by the request itself: every replica would return it
    reprefilled: bool = False  # the KV behind these tokens was recomputed since the last delta
    # No token gained before is valid: of an "error", those since the request was submitted; of one that continues, not
    # even those of its ``partial``: it starts again from its prompt.
    void: bool = False
    token_rows: dict[str, TokenRows] = {}  # by kind, of tokens behind those whose rows were returned before

    @classmethod
    def of(cls, request_id: str, ids: Sequence[int], logprobs: Sequence[float], **fields: Any) -> TokenDelta:
        """Make a delta of these tokens; ``fields``: its other fields."""
        return cls(request_id=request_id, data=sampled(ids, logprobs).tobytes(), **fields)

    @property
    def ids(self) -> TokenIds:
        return TokenIds(np.frombuffer(self.data, SAMPLED)["id"])

    @property
    def logprobs(self) -> TokenLogprobs:
        return TokenLogprobs(np.frombuffer(self.data, SAMPLED)["logprob"])


class GenerationResult(msgspec.Struct, frozen=True, kw_only=True):
    """A finished model call."""

    request_id: str
    response: PartialResponse  # all sampled tokens
    finish_reason: FinishReason
    error: str = ""
    refused: bool = False  # the request itself caused the error: retrying is no use
    reprefills: int = 0  # how often its KV was recomputed (update, preemption, engine restart)
    resumes: int = 0  # how often it was moved off a dead engine
    first_token_s: float = 0.0  # the caller's clock when this request's first new token arrived; 0: unknown


class PublishedPart(msgspec.Struct, frozen=True, kw_only=True):
    """The ranges of a version's file that are on one node, if ranks on several have published it together."""

    node: str  # "": the orchestrator's machine
    path: str  # of the node's file, which is as long as that of all
    ranges: tuple[tuple[int, int], ...]  # the first byte of each, and the byte after the last


class PublishedDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The values that changed between two versions, in a file of their own (`headway/weights/deltas.py`)."""

    version: int
    checksum: str  # of the version, as in `PublishedWeights`
    base: int  # the version that it leads from
    base_checksum: str
    path: str
    size_bytes: int
    digest: str  # of the file, XXH3 of 128 bits, hex


class PublishedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """A version of the weights that subscribers can fetch: of the whole model, or of an adapter alone."""

    version: int
    path: str  # file in shared memory (or on disk) that holds it, or all but its payload: see ``handle``
    checksum: str  # root of its table of hashes (`headway/weights/checksums.py`), hex
    size_bytes: int
    publish_s: float = 0.0  # time the publisher took, of which
    snapshot_s: float = 0.0  # ... the trainer could not go on
    hash_s: float = 0.0  # ... hashing
    encode_s: float = 0.0  # ... encoding the delta; the rest is copying to the host, if any, all beside the next step
    adapter: str = ""  # name of the adapter whose weights these are; "": the model's
    handle: str = ""  # of the device memory that holds the payload, for processes that can map it; "": the file does
    parts: tuple[PublishedPart, ...] = ()  # the nodes that have a part each, the first one's with the header; (): one
    deltas: tuple[PublishedDelta, ...] = ()  # each from the version of the one before it, the last one to this version

    @property
    def transport(self) -> Literal["shared memory", "cuda ipc"]:
        """The path from the publisher to readers on its machine: see `runtime/transport/paths.py`."""
        return "cuda ipc" if self.handle else "shared memory"


class AppliedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's report that it applied a version."""

    version: int
    fetch_s: float = 0.0  # copy and verify, whether or not decoding continues
    check_s: float = 0.0  # ... of it, verifying
    pause_s: float = 0.0  # time no token could be generated; fetching included where decoding waits for it
    in_flight: int = 0  # requests that crossed the update
    damage: str = ""  # tensor of the weights before it that had changed in the engine's memory; requests ended with it
    reprefilled_tokens: int = 0  # KV tokens recomputed because of it


class EngineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one engine since it started, and its present state."""

    version: int = 0
    running: int = 0  # requests holding a slot
    waiting: int = 0  # requests queued inside the engine
    compiling: int = 0  # of these, the ones whose grammars are being compiled
    slots: int = 0
    kv_used_tokens: int = 0
    kv_capacity_tokens: int = 0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    finished: int = 0
    preemptions: int = 0
    busy_s: float = 0.0  # time inside model calls
    idle_s: float = 0.0  # time with nothing to do: the generator waits
    paused_s: float = 0.0  # time inside weight updates
    yielded_s: float = 0.0  # time its device was yielded to the trainer; not idle then, whether it had requests or not
    decode_steps: int = 0
    idle: bool = False  # it is sent no requests: neither waiting nor yielded


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Occupied and free slots and KV tokens of all engines together, at one moment."""

    slots: int = 0
    running_rollouts: int = 0  # requests that hold a slot
    waiting_rollouts: int = 0  # requests that wait for one
    kv_used_tokens: int = 0
    kv_capacity_tokens: int = 0

    @staticmethod
    def total(engines: Sequence[EngineStatistics]) -> EngineLoad:
        """The present load of ``engines`` as one."""
        return EngineLoad(
            slots=sum(engine.slots for engine in engines),
            running_rollouts=sum(engine.running for engine in engines),
            waiting_rollouts=sum(engine.waiting for engine in engines),
            kv_used_tokens=sum(engine.kv_used_tokens for engine in engines),
            kv_capacity_tokens=sum(engine.kv_capacity_tokens for engine in engines),
        )


class RouterStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A router's load in tokens (prompts and still allowed responses of open requests), and its counters since it
    started (in a ledger: since the step before)."""

    used_tokens: int = 0
    capacity_tokens: int = 0  # KV tokens of the replicas that take requests
    peak_tokens: int = 0  # most ever used at once
    open_requests: int = 0
    waiters: int = 0  # requests without a replica: none takes any now, or a limit delays them
    oldest_age_s: float = 0.0  # of the open request that came first
    breakers_open: int = 0  # of replicas, half-open ones included
    routed: int = 0  # requests given to a replica; one that moves counts again
    spills: int = 0  # ... of these, past a replica with more of their prompt in KV
    moves: int = 0  # requests moved off a replica with the tokens they had: it died, is idled or removed
    retries: int = 0  # requests that a replica didn't accept, given to another
    refusals: int = 0  # of foreign callers
    breaker_openings: int = 0


ROUTER_COUNTERS = ("routed", "spills", "moves", "retries", "refusals", "breaker_openings")


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Random tokens that trainer and engines score, behind a prompt with pictures or alone."""

    ids: tuple[int, ...]
    prompt: tuple[int, ...] = ()
    pixels: str = ""  # content hash of the pixel arrays of the prompt's pictures


class PathScores(msgspec.Struct, frozen=True, kw_only=True):
    """A probe's scores by one way of computing them. L layers, N tokens with the prompt's, P projections."""

    logprobs: np.ndarray  # float32: of each of `Probe.ids` that has a token before it, at temperature 1
    hidden: np.ndarray | None = None  # [L + 1, N, P] float32: see `models.hidden_states`; None: unavailable


class ProbeScores(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of a probe by a trainer or an engine, by every way in which it may compute it."""

    probe: Probe
    precision: str  # of the arithmetic or the weights, whichever is coarser: a key of `control.agreement.LIMITS`
    mixture: bool = False  # whether routers choose experts: a trainer says so
    paths: dict[str, PathScores]  # trainer: alone, packed; engine: prefill, and decode where it can be forced


class PromptLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of given tokens by an engine's newest weights: at temperature 1, over the whole vocabulary. L
    tokens, K others."""

    version: int  # of the weights
    logprobs: np.ndarray  # [L] float32, nats; NaN for the first token, which follows nothing
    top_ids: np.ndarray  # [L, K] int32: the K likeliest tokens in each one's place, likeliest first; -1 for the first
    top_logprobs: np.ndarray  # [L, K] float32; NaN for the first
    target_logprobs: np.ndarray | None = None  # [L, T] float32: of T ids in each one's place; NaN where there is none

    @classmethod
    def unscored(cls, version: int, tokens: int, top: int) -> PromptLogprobs:
        """Make arrays of ``tokens`` tokens, with ``top`` others each, to be filled in: as the first token's are."""
        top_ids, top_logprobs = np.full((tokens, top), -1, np.int32), np.full((tokens, top), np.nan, np.float32)
        logprobs = np.full(tokens, np.nan, np.float32)
        return cls(version=version, logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs)

    def fill(self, position: int, logprob: float, likeliest: Sequence[tuple[int, float]]) -> None:
        """Set a token's log-probability, and the likeliest ids with theirs. Raises ValueError for fewer than K."""
        count = self.top_ids.shape[1]
        if len(likeliest) < count:
            raise ValueError(f"{len(likeliest)} likeliest tokens where {count} were asked for")
        self.logprobs[position] = logprob
        for rank, (token, top_logprob) in enumerate(likeliest[:count]):
            self.top_ids[position, rank], self.top_logprobs[position, rank] = token, top_logprob


def probe_ids(seed: int, vocabulary: int, context_tokens: int) -> tuple[int, ...]:
    """Return random token ids, equal for equal arguments on every machine; the context has room for one more."""
    tokens = max(2, min(PROBE_TOKENS, context_tokens - 1))
    random_bits = np.random.Philox(key=[_PROBE_KEY, seed]).random_raw(tokens)
    return tuple((random_bits % np.uint64(vocabulary)).tolist())
