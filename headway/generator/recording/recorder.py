"""Records the calls of one rollout, token-exact: which earlier answer a request continues, and its answers.

No clock, no I/O, no engine: `begin` returns a request's prompt ids, the caller passes the sampled tokens to `commit`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from headway.config.endpoint import EndpointConfig
from headway.generator.recording.answer_tree import (
    CallPlan,
    CallRequest,
    RecordedCall,
    RecordedTurn,
    branches_of,
    ids_to,
)
from headway.generator.recording.observations import observed_runs
from headway.records.conversations import Cause, RecordedConversation, RequestRefused
from headway.records.generation import GenerationResult
from headway.records.tokens import TokenIds
from headway.tokens.continuation import Chat
from headway.tokens.messages import Message, canonical_value, history_keys, next_key

_RAW = "raw"  # root key of raw prompts
_REPEATABLE = 16  # answered calls that a retry can repeat, the newest: each keeps its whole prompt's tokens


class Recorder:
    """The tree of answers of one rollout. Invariant: the tokens on the path to an answer are its prompt's and its own,
    exactly as the engine got and returned them; `commit` checks it.

    Example:

        call = recorder.begin(CallRequest(messages=normal_messages(body["messages"])))
        results = [await generate(call.prompt_ids, call.max_tokens, purpose) for purpose in call.purposes]
        recorder.commit(call, results)
        answers = [turn.message for turn in call.turns if turn is not None]
        ...  # send them to the client
        recorder.note_received(call)

    Several calls may be open at once; every method is synchronous and atomic.
    """

    def __init__(
        self, chat: Chat, settings: EndpointConfig, context_tokens: int, name: str = "", secrets: Sequence[str] = ()
    ) -> None:
        """``settings``: limits on the calls, beyond which requests are refused. ``context_tokens``: limit of a call's
        prompt and response. ``name``: the rollout's; it makes the ids of its tool calls unique. ``secrets``: texts that
        aren't learned where a tool's answer has them, beside those of ``settings``."""
        self.chat = chat
        self._secrets = (*settings.secrets, *secrets)
        self._name = name
        self._settings = settings
        self._context_tokens = context_tokens
        self._turns: list[RecordedTurn] = []
        self._roots: list[RecordedTurn] = []
        self._answered: dict[bytes, list[RecordedTurn]] = {}  # by key of the conversation, answer included
        self._asked: dict[bytes, list[RecordedTurn]] = {}  # by key of the conversation without the answer
        self._open: set[RecordedCall] = set()
        self._earlier: dict[str, RecordedCall] = {}  # newest call by fingerprint
        self._repeatable: deque[RecordedCall] = deque()  # answered calls with a fingerprint, oldest first
        self._siblings: Counter[str] = Counter()  # choices begun, by prompt and seed
        self._unread: dict[int, RecordedCall] = {}  # by number: answered, but not received by a client
        self._causes: Counter[str] = Counter()
        self._begun = self._abandoned_calls = self._sampled = self._abandoned_tokens = 0
        self._resumes = self._reprefills = 0
        self.kept_tokens = 0  # of prompts and answers, a measure of its memory
        self._first_token_s = 0.0
        self._cut = self._closed = False

    @property
    def turns(self) -> Sequence[RecordedTurn]:
        """All answers, in order of completion."""
        return self._turns

    def earlier(self, fingerprint: str) -> RecordedCall | None:
        """Return the call with this fingerprint, open or answered, whose tokens answer a retry. None if it was
        forgotten or abandoned."""
        return self._earlier.get(fingerprint)

    def plan(self, request: CallRequest) -> CallPlan:
        """Compute the slow part of `begin`: find the parent of a large request and tokenize its prompt. Doesn't change
        the tree, so it may run in a thread while other calls begin and end. Raises RequestRefused."""
        with self._cuts_noted():
            self._require_open()
            self._require_budget()
            self._require_valid(request)
            return self._plan(request)

    def begin(self, request: CallRequest, fingerprint: str = "", planned: CallPlan | None = None) -> RecordedCall:
        """Open a call for a request; ``planned``: the result of `plan`, if it was called. Raises RequestRefused: over a
        limit, too long for the context, or refused by the template."""
        with self._cuts_noted():
            self._require_open()
            if planned is None:
                self._require_valid(request)
            self._require_budget()
            planned = planned or self._plan(request)
            prompt_ids = TokenIds.joined((ids_to(planned.parent), planned.context_ids))
            call = RecordedCall(
                number=self._begun,
                request=request,
                planned=planned,
                prompt_ids=prompt_ids,
                max_tokens=self._response_limit(prompt_ids, request),
                purposes=self._purposes(prompt_ids, request),
                fingerprint=fingerprint,
            )
        self._begun += 1
        self._cut = False
        self._open.add(call)
        if fingerprint:
            self._earlier[fingerprint] = call
        return call

    @contextmanager
    def _cuts_noted(self) -> Iterator[None]:
        try:
            yield
        except RequestRefused as refusal:
            self._cut |= refusal.code in ("context_length_exceeded", "rollout_limit_exceeded")
            raise

    def commit(self, call: RecordedCall, results: Sequence[GenerationResult]) -> None:
        """Record the results of an open call, one for each choice; they carry no loss until `note_received`. Failed or
        aborted choices are abandoned. No-op for a call that was abandoned meanwhile (e.g. its rollout was closed).
        Raises ValueError, with nothing recorded, for results that aren't token-exact and for an answered call."""
        if call.state == "abandoned":
            return
        if len(results) != call.request.choices:
            raise ValueError(f"call {call.number}: {len(results)} results for {call.request.choices} choices")
        for result in results:
            _require_exact(call, result)
        self._end(call, "answered")
        call.turns = tuple(self._record_turn(call, choice, result) for choice, result in enumerate(results))
        call.forget_question()
        if call.fingerprint:
            self._repeatable.append(call)
        if len(self._repeatable) > _REPEATABLE:
            self._forget(self._repeatable.popleft())
        if None in call.turns:  # its caller gets an error and may retry
            self._forget(call)
        if any(call.turns):
            self._unread[call.number] = call
        else:
            self._abandoned_calls += 1

    def note_received(self, call: RecordedCall, received: bool = True) -> None:
        """Note that a client got every byte of an answered call, whose tokens then carry loss. ``received`` False
        revokes that: the client closed its connection before reading. No-op for a call without an answer."""
        turns = [turn for turn in call.turns if turn is not None]
        if not turns:
            return
        was_received, call.readers = call.readers > 0, call.readers + (1 if received else -1)
        for turn in turns:
            turn.received = call.readers > 0
        if was_received == turns[0].received:
            return
        self._causes[call.planned.cause] += -1 if was_received else 1
        if was_received:
            self._unread[call.number] = call
        else:
            del self._unread[call.number]

    def abandon(self, call: RecordedCall, results: Sequence[GenerationResult] = ()) -> None:
        """End an open call whose caller has left or whose generation failed: the tokens of ``results`` are counted but
        never carry loss. No-op for a call that isn't open."""
        if call.state != "open":
            return
        self._end(call, "abandoned")
        self._forget(call)
        self._abandoned_calls += 1
        for result in results:
            self._count(result)
            self._abandoned_tokens += len(result.response.ids)

    def close(self) -> RecordedConversation:
        """Close the rollout and return its conversation. Further requests are refused; open calls, and answers that no
        client received, count as abandoned."""
        self._closed = True
        for call in list(self._open):
            self.abandon(call)
        unread_turns = [turn for call in self._unread.values() for turn in call.turns if turn is not None]
        conversation = RecordedConversation(
            branches=branches_of(self._turns),
            turns=len(self._turns) - len(unread_turns),
            calls=sum(self._causes.values()),
            abandoned_calls=self._abandoned_calls + len(self._unread),
            abandoned_tokens=self._abandoned_tokens + sum(len(turn.answer.ids) for turn in unread_turns),
            causes=dict(+self._causes),
            cut=self._cut,
            first_token_s=self._first_token_s,
            resumes=self._resumes,
            reprefills=self._reprefills,
        )
        for turn in self._turns:  # break reference cycles, so that memory is freed at once
            turn.children.clear()
        return conversation

    # Position of a request in the tree.

    def _plan(self, request: CallRequest) -> CallPlan:
        keys = history_keys(_root_key(request), request.messages)
        parent, text, context_ids, cause = self._find_parent(request, keys)
        plan = CallPlan(parent=parent, text=text, context_ids=context_ids, cause=cause, keys=keys)
        observes = self._settings.observes and parent is not None and request.prompt is None
        return dataclasses.replace(plan, observations=self._observations(plan, request)) if observes else plan

    def _observations(self, plan: CallPlan, request: CallRequest) -> tuple[tuple[int, int], ...]:
        """The runs of a continuing prompt's tokens that tools' answers became."""
        parent = plan.parent
        assert parent is not None
        earlier_messages = self._restored(request.messages, plan.keys)[: parent.messages]

        def render(messages: Sequence[Message]) -> str:
            return self.chat.prompt(
                (*earlier_messages, *messages), request.tools, request.variables, continues=request.continues
            )

        end_offset = self.chat.answer_end(parent.answer, plan.text, 0, tools=request.tools) or 0
        new_messages, prior_id = request.messages[parent.messages :], parent.answer.ids[-1]
        new_text, tokenizer = plan.text[end_offset:], self.chat.tokenizer
        return observed_runs(tokenizer, new_messages, render, new_text, prior_id, plan.context_ids, self._secrets)

    def _find_parent(self, request: CallRequest, keys: list[bytes]) -> tuple[RecordedTurn | None, str, TokenIds, Cause]:
        """Return (the answer that a request continues, text and token ids of its prompt after it, cause)."""
        chat, limit = self.chat, self._context_tokens
        if isinstance(request.prompt, tuple):
            return self._find_parent_of_ids(TokenIds(request.prompt), request.adapter)
        is_raw = request.prompt is not None
        if request.prompt is not None:
            text, candidates = request.prompt, self._raw_candidates(keys[0])
        else:
            messages = self._restored(request.messages, keys)
            text = chat.prompt(messages, request.tools, request.variables, continues=request.continues)
            candidates = self._candidates(messages, keys)
        rewritten = False
        for turn, answered in candidates:
            offset = turn.read_as_fed(text)
            if offset is None:
                rewritten |= answered and not is_raw
                continue
            if not answered and is_raw and offset < len(text):  # a token may cross the end of the shared prompt
                continue
            if not answered:  # the same prompt, continued differently
                more_ids = chat.encode_after(turn.context_ids[-1] if turn.context_ids else None, text[offset:], limit)
                cause: Cause = "rewritten" if rewritten else "branched" if more_ids else "sibling"
                return turn.parent, text[turn.start :], turn.context_ids + more_ids, cause
            end_offset = chat.answer_end(turn.answer, text, offset, exactly=is_raw, tools=request.tools)
            if end_offset is None:
                rewritten |= not is_raw
                continue
            ids = TokenIds(chat.encode_after(turn.answer.ids[-1], text[end_offset:], limit))
            return turn, text[offset:], ids, "rewritten" if rewritten else "branched" if turn.children else "continued"
        prompt_ids = chat.tokenizer.encode_prompt(text, limit) if is_raw else chat.encode(text, limit)
        return None, text, TokenIds(prompt_ids), "rewritten" if rewritten else "branched" if self._roots else "start"

    def _find_parent_of_ids(self, prompt: TokenIds, adapter: str) -> tuple[RecordedTurn | None, str, TokenIds, Cause]:
        """Find the longest path of an adapter that a prompt of token ids begins with; returns as `_find_parent`."""
        best, matched_tokens = None, 0
        pending_turns = [(turn, 0) for turn in self._roots if turn.adapter == adapter]
        while pending_turns:
            turn, offset = pending_turns.pop()
            prompt_end, end = offset + len(turn.context_ids), offset + len(turn.context_ids) + len(turn.answer.ids)
            if prompt[offset:prompt_end] == turn.context_ids and prompt[prompt_end:end] == turn.answer.ids:
                pending_turns += [(child, end) for child in turn.children]
                if best is None or (end, turn.number) > (matched_tokens, best.number):  # ties: the newest
                    best, matched_tokens = turn, end
        child_turns = [turn for turn in self._roots if turn.adapter == adapter] if best is None else best.children
        cause: Cause = "start" if not self._roots else "branched" if child_turns else "continued"
        if any(prompt[matched_tokens:] == turn.context_ids for turn in child_turns):
            cause = "sibling"
        rest_text = self.chat.tokenizer.decode(prompt[matched_tokens:], keep_special=True)
        return best, rest_text, prompt[matched_tokens:], cause

    def _raw_candidates(self, key: bytes) -> Iterator[tuple[RecordedTurn, bool]]:
        """Yield (answer, answer included): answers to raw prompts, longest prompt first, then again for their prompts
        alone."""
        turns = self._asked.get(key, [])
        longest_first = sorted(turns, key=lambda turn: turn.start + len(turn.text), reverse=True)
        yield from ((turn, True) for turn in longest_first)
        yield from ((turn, False) for turn in longest_first)

    def _candidates(self, messages: Sequence[Message], keys: list[bytes]) -> Iterator[tuple[RecordedTurn, bool]]:
        """Yield (answer, answer included): answers whose conversation, or whose prompt alone, is a prefix of the
        request's, longest first."""
        for message_count in range(len(messages), 0, -1):
            turn = self._match(messages, keys, message_count)
            if turn is not None:
                yield turn, True
            for sibling in self._asked.get(keys[message_count], [])[-1:]:
                yield sibling, False

    def _match(
        self, messages: Sequence[Message], keys: list[bytes], length: int, *, missing: bool = False
    ) -> RecordedTurn | None:
        """Choose among the answers with the key of the first ``length`` messages: most tool call ids in common, then
        most identical texts, then the newest. Equal keys mean equal messages up to formatting and reasoning, which is
        compared here; ``missing``: the client may have left it out."""
        best_turn: RecordedTurn | None = None
        best_score = (-1, -1)
        for turn in self._answered.get(keys[length], []):
            equal_ids, equal_texts = 0, 0
            for path_turn in turn.path:
                ours, sent_message = path_turn.sent, messages[path_turn.messages - 1]
                if ours.reasoning != sent_message.reasoning and not (missing and not sent_message.reasoning):
                    break
                equal_ids += sum(a.call_id == b.call_id for a, b in zip(ours.calls, sent_message.calls, strict=True))
                equal_texts += ours.content == sent_message.content
            else:
                if (equal_ids, equal_texts) >= best_score:
                    best_turn, best_score = turn, (equal_ids, equal_texts)
        return best_turn

    def _restored(self, messages: tuple[Message, ...], keys: list[bytes]) -> tuple[Message, ...]:
        """Return the messages with the reasoning restored that the client left out, if configured. The longest match
        decides for all answers on its path."""
        if self._settings.history_reasoning == "as_sent":
            return messages
        restored, settled_indices = list(messages), set[int]()
        for index in range(len(messages) - 1, -1, -1):
            if messages[index].role != "assistant" or messages[index].reasoning or index in settled_indices:
                continue
            turn = self._match(messages, keys, index + 1, missing=True)
            for path_turn in [] if turn is None else turn.path:
                pos, ours = path_turn.messages - 1, path_turn.sent
                if pos not in settled_indices and ours.reasoning and not messages[pos].reasoning:
                    restored[pos] = dataclasses.replace(messages[pos], reasoning=ours.reasoning, written=ours.inline)
                settled_indices.add(pos)
        return tuple(restored)

    # Limits.

    def _require_open(self) -> None:
        if self._closed:
            raise RequestRefused("this rollout has ended: its key accepts no further calls", code="rollout_closed")
        if len(self._open) >= self._settings.open_calls:
            raise RequestRefused(f"this rollout has {self._settings.open_calls} calls open", code="rollout_busy")

    def _require_valid(self, request: CallRequest) -> None:
        if isinstance(request.prompt, tuple) and not request.answers:
            return
        if isinstance(request.prompt, tuple):
            self._require_context(len(request.prompt), request)
        vocabulary_size = self.chat.tokenizer.vocabulary_size
        if isinstance(request.prompt, tuple) and not all(0 <= i < vocabulary_size for i in request.prompt):
            raise RequestRefused(f"prompt: valid token ids are 0 to {vocabulary_size - 1}", param="prompt")
        if not 1 <= request.choices <= self._settings.choices:
            raise RequestRefused(f"n = {request.choices}: valid: 1 to {self._settings.choices}", param="n")
        if request.max_tokens is not None and request.max_tokens < 1:
            raise RequestRefused(f"max_tokens = {request.max_tokens}: 1 or more are needed", param="max_tokens")

    def _require_budget(self) -> None:
        for unit, used_count, limit in (
            ("calls", self._begun, self._settings.calls),
            ("sampled tokens", self._sampled, self._settings.sampled_tokens),
        ):
            if used_count >= limit:
                raise RequestRefused(f"this rollout has used its {limit} {unit}", code="rollout_limit_exceeded")

    def _response_limit(self, prompt_ids: TokenIds, request: CallRequest) -> int:
        """Return how many tokens each response may have. Raises RequestRefused for a prompt that leaves none."""
        if not prompt_ids:
            raise RequestRefused("the prompt has no token", param=request.param)
        self._require_context(len(prompt_ids), request)
        remaining_tokens = min(self._context_tokens - len(prompt_ids), self._settings.sampled_tokens - self._sampled)
        return min(remaining_tokens, request.max_tokens or remaining_tokens)

    def _require_context(self, tokens: int, request: CallRequest) -> None:
        """Raise RequestRefused if a prompt of ``tokens`` tokens leaves no token for the response."""
        limit = self._context_tokens
        if tokens >= limit:  # clients recognise an overflow by this text
            count_text = tokens if tokens <= 2 * limit else f"more than {2 * limit}"
            raise RequestRefused(
                f"This model's maximum context length is {limit} tokens. However, your request has {count_text} prompt "
                "tokens, which leaves none for the response. Please shorten it.",
                param=request.param,
                code="context_length_exceeded",
            )

    def _purposes(self, prompt_ids: TokenIds, request: CallRequest) -> tuple[str, ...]:
        """Make the keys of the choices' random numbers: prompt tokens, the client's seed, and a count of equal requests
        before. So concurrent calls get the same random numbers in any order, and a fixed seed of a client's doesn't
        make rollouts equal."""
        prefix = f"{_digest(prompt_ids.array.astype('<i8').tobytes())}:{'' if request.seed is None else request.seed}"
        first_index = self._siblings[prefix]
        self._siblings[prefix] += request.choices
        return tuple(f"{prefix}:{first_index + choice}" for choice in range(request.choices))

    # Results.

    def _end(self, call: RecordedCall, state: Literal["answered", "abandoned"]) -> None:
        if call.state != "open":
            raise ValueError(f"call {call.number} is {call.state} already")
        call.state = state
        self._open.discard(call)

    def _forget(self, call: RecordedCall) -> None:
        if self._earlier.get(call.fingerprint) is call:
            del self._earlier[call.fingerprint]

    def _count(self, result: GenerationResult) -> None:
        self._sampled += len(result.response.ids)
        self._resumes += result.resumes
        self._reprefills += result.reprefills
        if result.response.ids and result.first_token_s > 0:
            self._first_token_s = min(self._first_token_s or result.first_token_s, result.first_token_s)

    def _record_turn(self, call: RecordedCall, choice: int, result: GenerationResult) -> RecordedTurn | None:
        self._count(result)
        response, finish_reason = result.response, result.finish_reason
        if not response.ids or (finish_reason != "stop" and finish_reason != "length"):
            self._abandoned_tokens += len(response.ids)
            return None
        plan = call.planned
        turn = RecordedTurn(
            number=len(self._turns),
            call=call.number,
            choice=choice,
            parent=plan.parent,
            text=plan.text,
            context_ids=plan.context_ids,
            observations=plan.observations,
            answer=self.chat.answer(
                response.ids,
                plan.text,
                calls=call.request.calls and bool(call.request.tools),
                tools=call.request.tools,
                stop=call.request.stop,
                call_prefix=f"call_{_digest(f'{self._name} {call.purposes[choice]}')}_",
            ),
            logprobs=response.logprobs,
            versions=response.versions,
            token_rows=response.token_rows,
            grammar=call.request.grammar,
            finish_reason=finish_reason,
            own_limit=len(response.ids) == call.request.max_tokens,
            begun=call.request.messages[-1] if call.request.continues else None,
            messages=len(call.request.messages) + (not call.request.continues),
            adapter=call.request.adapter,
        )
        if ids_to(turn) != TokenIds.joined((call.prompt_ids, response.ids)):
            raise AssertionError(f"call {call.number}: the path to its answer isn't what the engine was given")
        self._turns.append(turn)
        self.kept_tokens += len(turn.context_ids) + len(response.ids)
        (self._roots if turn.parent is None else turn.parent.children).append(turn)
        if not isinstance(call.request.prompt, tuple):
            self._asked.setdefault(plan.keys[-1], []).append(turn)
        if call.request.prompt is None:
            history_key = plan.keys[-2 if call.request.continues else -1]
            self._answered.setdefault(next_key(history_key, turn.sent), []).append(turn)
        return turn


def _root_key(request: CallRequest) -> str:
    """Return the key of a conversation's adapter, tools and template variables, which a continuation must share: the
    answers of another adapter are part of its prompt."""
    is_raw = request.prompt is not None
    return request.adapter + (_RAW if is_raw else canonical_value([request.tools or [], dict(request.variables)]))


def _digest(data: bytes | str) -> str:
    return hashlib.blake2b(data.encode() if isinstance(data, str) else data, digest_size=12).hexdigest()


def _require_exact(call: RecordedCall, result: GenerationResult) -> None:
    response = result.response
    spanned = sum(span.tokens for span in response.versions)
    if not len(response.ids) == len(response.logprobs) == spanned:
        raise ValueError(
            f"call {call.number}: {len(response.ids)} tokens, {len(response.logprobs)} log-probabilities, {spanned} "
            "tokens in version spans"
        )
    if len(response.ids) > call.max_tokens:
        raise ValueError(f"call {call.number}: {len(response.ids)} tokens but at most {call.max_tokens} were allowed")
