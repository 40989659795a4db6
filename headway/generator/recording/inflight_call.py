"""A recorded call in progress: sampling its choices concurrently, notifying its listeners, ending it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from headway.generator.recording.answer_tree import RecordedCall, rows_known
from headway.generator.recording.recorder import Recorder
from headway.records.conversations import ClientSampling, RequestRefused, SampleTurn, TurnRequest
from headway.records.generation import GenerationResult, PartialResponse
from headway.runtime.supervision import cancel_all

_VOID = "streamed tokens were sampled by another version; send the request again"


class CallFailed(Exception):
    """A call that failed. ``timeout``: it took too long."""

    def __init__(self, message: str, *, timeout: bool = False) -> None:
        super().__init__(message)
        self.timeout = timeout


class InflightCall:
    """State of a call: *sampling* -> *over*, when ``call.turns`` has an answer for each choice, or ``error`` is set.

    Listeners ``join`` and leave; when the last one leaves before the end, the call is abandoned and its requests end
    in the engine. A call is answered entirely or not at all: if one choice fails, the call fails.
    """

    def __init__(self, recorder: Recorder, call: RecordedCall) -> None:
        self.call = call
        self.error: Exception | None = None
        self.partials: list[PartialResponse] = []  # of each choice, all tokens so far
        self.streamed: list[Sequence[int]] = [()] * call.request.choices  # tokens whose text was sent to a client
        self.task: asyncio.Task[None] | None = None  # None for a call that was answered before
        self._recorder = recorder
        self._listeners: set[Callable[[], object]] = set()
        self._unaccepted = set(range(call.request.choices))
        for turn in call.turns or (None,) * call.request.choices:
            answered_response = turn is not None and PartialResponse(ids=turn.answer.ids, logprobs=turn.logprobs)
            self.partials.append(answered_response or PartialResponse())

    def begin(self, sample: SampleTurn, client: ClientSampling, timeout_s: float) -> None:
        """Start sampling; the call fails after ``timeout_s`` seconds."""
        self.task = asyncio.create_task(self._answer(sample, client, timeout_s), name=f"call-{self.call.number}")
        self.task.add_done_callback(self._ended)  # also runs if the task is cancelled before it starts

    @property
    def over(self) -> bool:
        return self.task is None or self.task.done()

    @property
    def accepted(self) -> bool:
        """Whether the generator has accepted all choices, so that none can be refused."""
        return not self._unaccepted

    @property
    def undelivered(self) -> list[GenerationResult]:
        """Tokens sampled so far, as aborted results."""
        return [GenerationResult(request_id="", response=response, finish_reason="abort") for response in self.partials]

    def note_received(self, received: bool = True) -> None:
        """See `Recorder.note_received`."""
        self._recorder.note_received(self.call, received)

    def join(self, listener: Callable[[], object]) -> Callable[[], None]:
        """Call ``listener`` on every change from now on. Returns a function that removes it."""
        self._listeners.add(listener)

        def leave() -> None:
            self._listeners.discard(listener)
            if not self._listeners:
                self.cancel()

        return leave

    async def wait(self, *others: asyncio.Task[Any]) -> None:
        """Listen until the call is over, or one of ``others`` is done."""
        if self.task is not None:
            leave = self.join(lambda: None)
            try:
                await asyncio.wait((self.task, *others), return_when=asyncio.FIRST_COMPLETED)
            finally:
                leave()

    def cancel(self, error: Exception | None = None) -> None:
        """End the call without an answer, with ``error``. No-op for one that is over."""
        if self.task is not None and not self.task.done():
            self.error = error or self.error
            self._recorder.abandon(self.call, self.undelivered)
            self.task.cancel()

    def _extends_streamed(self, choice: int, partial: PartialResponse) -> bool:
        """Whether ``partial`` begins with the tokens of this choice that were sent to a client."""
        streamed_ids = self.streamed[choice]
        return partial.ids[: len(streamed_ids)] == streamed_ids

    def _notify_listeners(self) -> None:
        for listener in tuple(self._listeners):
            listener()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self.error = self.error or CallFailed("the call was cancelled")
        self._recorder.abandon(self.call, self.undelivered)  # no-op if answered
        self._notify_listeners()

    async def _answer(self, sample: SampleTurn, client: ClientSampling, timeout_s: float) -> None:
        recorder, call = self._recorder, self.call
        try:
            async with asyncio.timeout(timeout_s) as timeout:
                results = await self._sampled(sample, client)
            failed_result = next((result for result in results if result.finish_reason not in ("stop", "length")), None)
            if failed_result is not None:
                recorder.abandon(call, results)
                self.error = _failure(call, failed_result)
                return
            recorder.commit(call, results)
            if call.state != "answered":
                self.error = RequestRefused("this rollout has ended", code="rollout_closed")
        except Exception as error:  # the one capture point of a call: listeners get the error
            timed_out = isinstance(error, TimeoutError) and timeout.expired()
            self.error = CallFailed(f"no answer within {timeout_s:g} s", timeout=True) if timed_out else error

    async def _sampled(self, sample: SampleTurn, client: ClientSampling) -> list[GenerationResult]:
        """Sample all choices concurrently; returns a result for each. The first error cancels the others."""
        call = self.call

        async def sample_choice(choice: int) -> GenerationResult:
            def on_partial(partial: PartialResponse) -> None:
                if not self._extends_streamed(choice, partial):  # no record would match what the client was sent
                    self.cancel(CallFailed(_VOID))
                    return
                self.partials[choice] = partial
                self._unaccepted.discard(choice)
                self._notify_listeners()

            turn_request = TurnRequest(
                prompt_ids=call.prompt_ids,
                max_tokens=call.max_tokens,
                stop=call.request.stop,
                purpose=call.purposes[choice],
                client=client,
                grammar=call.request.grammar,
                adapter=call.request.adapter,
                rows_known=rows_known(call.planned.parent),
            )
            choice_result = await sample(turn_request, on_partial)
            if not self._extends_streamed(choice, choice_result.response):
                raise CallFailed(_VOID)
            self.partials[choice] = choice_result.response
            return choice_result

        if call.request.choices == 1:
            return [await sample_choice(0)]
        tasks = [asyncio.create_task(sample_choice(choice)) for choice in range(call.request.choices)]
        try:
            done_tasks, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done_tasks:
                task.result()
            return [task.result() for task in tasks]
        finally:
            await cancel_all(*tasks)


def _failure(call: RecordedCall, result: GenerationResult) -> Exception:
    """Error of a call whose choice ended with ``result``."""
    reason = result.error or f"the generator ended it ({result.finish_reason})"
    if result.refused:
        return RequestRefused(reason, param=call.request.param)
    return CallFailed(reason)
