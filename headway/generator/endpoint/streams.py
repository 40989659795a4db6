"""Streams an answer while it is sampled: text is written once no further token can change it."""

from __future__ import annotations

import asyncio

from headway.generator.endpoint.completions import completion_text
from headway.generator.endpoint.dialect import Dialect, ParsedRequest, Piece, answer_texts, answers
from headway.generator.endpoint.errors import HttpError, http_error
from headway.generator.endpoint.exchange import STOPPING, ClientGone, HttpExchange
from headway.generator.recording.answer_tree import RecordedTurn
from headway.generator.recording.inflight_call import InflightCall
from headway.records.generation import PartialResponse
from headway.records.tokens import IdSequence, LogprobSequence
from headway.tokens.output_parsing import begins_inside_reasoning
from headway.tokens.streaming import AnswerStream


async def stream(exchange: HttpExchange, dialect: Dialect, parsed: ParsedRequest, answering: InflightCall) -> None:
    """Stream the answer of ``answering`` to its end. Raises ClientGone, and the call's error if it fails before the
    stream begins, when the response can still have an error's status."""
    changed_event, patience_s = asyncio.Event(), parsed.setting.settings.stream_ping_s
    leave = answering.join(changed_event.set)
    try:
        gone_task = exchange.gone()
        gone_task.add_done_callback(lambda task: changed_event.set())
        writer = dialect.writer(parsed, answering.call)
        choices = [_Choice(dialect, parsed, answering, n) for n in range(answering.call.request.choices)]
        await _wait_first(changed_event, answering, gone_task, patience_s)
        if answering.over and answering.error is not None:
            raise answering.error
        await exchange.begin_stream()
        await exchange.write(writer.begin())
        while not answering.over:
            await exchange.write(b"".join(writer.more(choice.increment(answering.partials)) for choice in choices))
            if gone_task.done():
                raise ClientGone
            if not await _wait_change(changed_event, answering, patience_s):
                await exchange.write(writer.ping)
        if answering.error is not None:
            await exchange.end_stream(writer.failed(http_error(answering.error)))
        else:
            turns = answers(answering.call)
            last_events = [writer.end(choice.last(turn), turn) for choice, turn in zip(choices, turns, strict=True)]
            await exchange.end_stream(b"".join([*last_events, writer.close()]))
            exchange.note_received(answering.note_received)
    except asyncio.CancelledError:
        if exchange.streaming and not exchange.answered:
            await exchange.end_stream(writer.failed(HttpError(503, STOPPING)))
        raise
    finally:
        leave()


async def _wait_first(changed: asyncio.Event, answering: InflightCall, gone: asyncio.Task[None], wait_s: float) -> None:
    """Wait for the first token, the end, or ``wait_s`` without a change. The patience counts only once the
    generator has accepted the call: until then it may be refused, so nothing may be written."""
    while not (answering.over or gone.done() or any(response.ids for response in answering.partials)):
        if not await _wait_change(changed, answering, wait_s if answering.accepted else None):
            return


async def _wait_change(changed: asyncio.Event, answering: InflightCall, patience_s: float | None) -> bool:
    """Wait for a change; returns whether there was one within ``patience_s`` seconds (None: wait forever)."""
    if not answering.over:
        try:
            async with asyncio.timeout(patience_s):
                await changed.wait()
        except TimeoutError:
            return False
    changed.clear()
    return True


class _Choice:
    """The progress of one choice: the text and tokens that were written."""

    def __init__(self, dialect: Dialect, parsed: ParsedRequest, answering: InflightCall, number: int) -> None:
        self._number = number
        self._streamed = answering.streamed
        self._parsed = dialect.parsed
        self._setting = parsed.setting
        self._tokens = 0
        request, chat = parsed.request, parsed.setting.chat
        self._stream = AnswerStream(
            chat.tokenizer,
            chat.written if dialect.parsed else None,
            calls=request.calls and bool(request.tools),
            opened=begins_inside_reasoning(answering.call.planned.text, chat.written),
            stop=request.stop,
        )

    def increment(self, partials: list[PartialResponse]) -> Piece:
        response = partials[self._number]
        self._streamed[self._number] = response.ids
        return self._piece(*self._stream.push(response.ids), response.ids, response.logprobs)

    def last(self, turn: RecordedTurn) -> Piece:
        setting = self._setting
        answer_text_pair = answer_texts(turn, setting) if self._parsed else ("", completion_text(turn, setting))
        return self._piece(*self._stream.finish(*answer_text_pair), turn.answer.ids, turn.logprobs)

    def _piece(self, reasoning: str, content: str, ids: IdSequence, logprobs: LogprobSequence) -> Piece:
        seen_tokens, self._tokens = self._tokens, max(self._tokens, len(ids))
        return Piece(self._number, reasoning, content, ids[seen_tokens:], logprobs[seen_tokens:])
