"""Requests whose grammars are being compiled while the engine serves the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Generic, TypeVar

from headway.generator.engines.requests import EngineRequest
from headway.tokens.grammar import GrammarRefused, Grammars, Matcher
from headway.tokens.tokenizer import Tokenizer

Entry = TypeVar("Entry", bound=EngineRequest)

COMPILE_S = 60.0  # longest wait of a request for its grammar, including those compiled before it
_PAUSE_S = 0.01  # an otherwise idle engine waits this long at a time, since requests may arrive


class CompilingGrammars(Generic[Entry]):
    """Requests that wait for their grammar. Each begins with a matcher that has consumed the tokens it has."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, now: Callable[[], float]) -> None:
        self.grammars = Grammars(tokenizer, vocabulary)
        self._now = now
        self._waiting: dict[Entry, tuple[Future[Matcher], float]] = {}  # with the deadline

    def __len__(self) -> int:
        return len(self._waiting)

    def start(self, entry: Entry) -> None:
        """Compile a request's grammar, unless it is compiled already. Once its states were exhausted twice, compile it
        for this request alone."""
        future = self.grammars.start(entry.sampling.grammar, entry.response, exclusive=entry.exhausted > 1)
        self._waiting[entry] = future, self._now() + COMPILE_S

    def discard(self, entry: Entry) -> bool:
        """Forget a request; returns whether it waited here."""
        if (pending_compile := self._waiting.pop(entry, None)) is None:
            return False
        return pending_compile[0].cancel() or True

    def take(self, *, idle: bool = False) -> Iterator[tuple[Entry, str, bool]]:
        """Yield (request, error, whether its grammar is at fault) for each request that waits no longer; error "": it
        has its matcher. ``idle``: wait a moment for the first."""
        if idle and self._waiting:
            wait([future for future, _ in self._waiting.values()], _PAUSE_S, FIRST_COMPLETED)
        now_s = self._now()
        for waiter, (future, deadline_s) in list(self._waiting.items()):
            if not future.done() and now_s < deadline_s:
                continue
            del self._waiting[waiter]
            if not future.done():
                future.cancel()
                yield waiter, f"grammar: it wasn't compiled within {COMPILE_S:.0f} s, others' before it included", False
            elif (error := future.exception()) is None:
                waiter.matcher = future.result()
                yield waiter, "", False
            else:  # GrammarRefused, or any other error of the library
                is_refused = isinstance(error, GrammarRefused)
                yield waiter, str(error) if is_refused else f"grammar: {error!r}", is_refused
