"""Requests whose grammars are being compiled, beside an engine that goes on with the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Generic, TypeVar

from headway.generator.engines.requests import EngineRequest
from headway.tokens.grammar import GrammarRefused, Grammars, Matcher
from headway.tokens.tokenizer import Tokenizer

Entry = TypeVar("Entry", bound=EngineRequest)

COMPILE_S = 60.0  # most seconds that a request waits for its grammar, others' before it included
_PAUSE_S = 0.01  # an engine with nothing else to do waits so long at a time: it may be given something


class CompilingGrammars(Generic[Entry]):
    """Requests that wait for their grammar. They begin with their matcher behind the tokens that they have."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, now: Callable[[], float]) -> None:
        self.grammars = Grammars(tokenizer, vocabulary)
        self._now = now
        self._waiting: dict[Entry, tuple[Future[Matcher], float]] = {}  # and until when

    def __len__(self) -> int:
        return len(self._waiting)

    def start(self, entry: Entry) -> None:
        """Compile a request's grammar, unless it is there already; from the second time that its states were used up
        on, for it alone."""
        future = self.grammars.start(entry.sampling.grammar, entry.response, alone=entry.exhausted > 1)
        self._waiting[entry] = future, self._now() + COMPILE_S

    def discard(self, entry: Entry) -> bool:
        """Forget a request; whether it waited here."""
        if (found := self._waiting.pop(entry, None)) is None:
            return False
        return found[0].cancel() or True

    def take(self, *, idle: bool = False) -> Iterator[tuple[Entry, str, bool]]:
        """Yield the requests that wait no longer: with their matcher, or with why they have none and whether that is
        their grammar's fault. ``idle``: wait a moment for the first."""
        if idle and self._waiting:
            wait([future for future, _ in self._waiting.values()], _PAUSE_S, FIRST_COMPLETED)
        late = self._now()
        for entry, (future, until) in list(self._waiting.items()):
            if not future.done() and late < until:
                continue
            del self._waiting[entry]
            if not future.done():
                future.cancel()
                yield entry, f"grammar: it wasn't compiled within {COMPILE_S:.0f} s, others' before it included", False
            elif (error := future.exception()) is None:
                entry.matcher = future.result()
                yield entry, "", False
            else:  # or whatever else the library raises
                refused = isinstance(error, GrammarRefused)
                yield entry, str(error) if refused else f"grammar: {error!r}", refused
