"""Tokens a second of the own engine within a grammar, and with the sets of top-p returned, against neither; and what
requests whose grammars are hard to compile cost the others.

Rounds of the sides alternate in one process; a ratio is the median over rounds, with the smallest and largest beside
it. The grammar is a JSON schema's: an array of records that no response reaches the end of, so that all sides sample as
many tokens. Random weights give distributions that are nearly flat, which no trained model has: all sides sample at a
low temperature, at which top-p 0.95 keeps as many ids as is printed.
"""

from __future__ import annotations

import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from engine import CONTEXT_TOKENS, STREAM_INTERVAL_S, prompts_of, ratios

from headway.generator.engines.torch.engine import TorchEngine
from headway.models.loading import load_for_generation
from headway.records.generation import GenerationRequest, SamplingParameters, TokenDelta
from headway.records.tokens import KEPT
from headway.tokens.grammar import json_grammar
from headway.tokens.tokenizer import Tokenizer
from headway.tokens.tokenizer_training import train_byte_fallback_tokenizer

TEMPERATURES = {"small": 0.3, "large": 0.2}
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 3, "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "email": {"type": "string", "format": "email"},
            "kind": {"enum": ["person", "company", "place"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
            "at": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}},
            "active": {"type": "boolean"},
        },
        "required": ["name", "age", "kind", "tags", "active"],
        "additionalProperties": False,
    },
}
SIDES: dict[str, dict[str, Any]] = {
    "plain": {},
    "with_grammar": {"grammar": json_grammar(SCHEMA)},
    "with_kept_sets": {"top_p": 0.95, "kept_sets": 1024},
}
BOMBS: dict[str, dict[str, Any]] = {
    "patterns": {"allOf": [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(14)]},
    "properties": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(3000)}},
    "multiple": {"type": "integer", "multipleOf": 99991},
    "enum": {"enum": [f"value {n}" for n in range(5000)]},
    "long": {"type": "string", "minLength": 10**9},
    "nested": {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"},
}


def tokenizer_of(vocabulary: int, folder: Path) -> Tokenizer:
    """Learnt from this repository's pages."""
    pages = Path(__file__).parents[2].joinpath("docs").glob("*.md")
    texts = [page.read_text() for page in pages] + [json_grammar(SCHEMA)]
    return train_byte_fallback_tokenizer(texts, vocabulary, folder)


def requests_of(prompts: list[list[int]], new_tokens: int, seed: int, **how: Any) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=f"{seed}-{i}",
            prompt_ids=tuple(prompt),
            sampling=SamplingParameters(max_tokens=new_tokens, seed=seed * 1000 + i, **how),
        )
        for i, prompt in enumerate(prompts)
    ]


class Rate:
    """Tokens and seconds of a round, as `engine.ratios` reads them."""

    def __init__(self, deltas: list[TokenDelta], seconds: float) -> None:
        if errors := {delta.error for delta in deltas if delta.error}:
            raise SystemExit(f"a request failed: {errors}")
        self.tokens = sum(len(delta.ids) for delta in deltas)
        self.rate = self.tokens / seconds
        rows = [delta.token_rows[KEPT] for delta in deltas if KEPT in delta.token_rows]
        self.kept_ids = sum(int(one.lengths.array.sum()) for one in rows) / self.tokens


def play(engine: TorchEngine, requests: list[GenerationRequest]) -> Rate:
    started, deltas = time.perf_counter(), list[TokenDelta]()
    engine.submit(requests)
    streamed_s = started
    while engine.step():
        if time.perf_counter() - streamed_s >= STREAM_INTERVAL_S:
            deltas += engine.take_deltas()
            streamed_s = time.perf_counter()
    deltas += engine.take_deltas()
    return Rate(deltas, time.perf_counter() - started)


def measure_structured(folder: Path, size: str, new_tokens: int, rounds: int, concurrent: int) -> dict[str, Any]:
    """Ratios of one model."""
    model = load_for_generation(folder, "float32", "cpu")
    tokenizer = tokenizer_of(model.config.vocabulary_size, folder / "tokenizer")
    engine = TorchEngine(model, slots=concurrent, max_context_tokens=CONTEXT_TOKENS, tokenizer=tokenizer)
    found: dict[str, list[Rate]] = {name: [] for name in SIDES}
    for number in range(rounds + 1):
        for name, how in sorted(SIDES.items(), reverse=number % 2 == 1):
            prompts = prompts_of(number, concurrent)
            round_ = play(engine, requests_of(prompts, new_tokens, number, temperature=TEMPERATURES[size], **how))
            if round_.tokens != concurrent * new_tokens:
                raise SystemExit(f"{name} gave {round_.tokens} tokens instead of {concurrent * new_tokens}")
            if number:
                found[name].append(round_)
    kept = statistics.fmean(one.kept_ids for one in found["with_kept_sets"])
    print(f"{size} model, {concurrent} concurrent, {new_tokens} new tokens; top-p 0.95 keeps {kept:.0f} ids a token")
    out: dict[str, Any] = {"kept_ids": round(kept, 1)}
    for name, done in found.items():
        out[f"{name}_tokens_per_s"] = round(statistics.median(one.rate for one in done))
        line = f"  {name:15} {out[f'{name}_tokens_per_s']:7,} tokens/s"
        if name != "plain":
            out[name] = ratios(done, found["plain"])  # type: ignore[arg-type]
            line += "  / plain {} [{}, {}]".format(*out[name])
        print(line, flush=True)
    return out


def measure_isolation(folder: Path, rounds: int, schemas: int) -> dict[str, Any]:
    """Latency of requests without a grammar beside as many others with and without one each, and memory."""
    model = load_for_generation(folder, "float32", "cpu")
    tokenizer = tokenizer_of(model.config.vocabulary_size, folder / "tokenizer")
    latencies: dict[bool, list[float]] = {False: [], True: []}
    memory = [memory_mb("VmRSS")]
    for number in range(rounds):
        for with_grammars in (False, True) if number % 2 == 0 else (True, False):
            engine = TorchEngine(model, slots=32, max_context_tokens=CONTEXT_TOKENS, tokenizer=tokenizer)
            latencies[with_grammars] += beside_others(engine, schemas, with_grammars)
            memory.append(memory_mb("VmRSS"))
    p99 = {which: float(np.percentile(values, 99)) for which, values in latencies.items()}
    print(
        f"  p99 of {len(latencies[True])} requests beside {schemas} schemas and {len(BOMBS)} bombs: {p99[True]:.3f} s, "
    )
    print(f"  beside as many without: {p99[False]:.3f} s; memory after each: {memory} MB, peak {memory_mb('VmHWM')} MB")
    return {"p99_beside_grammars": round(p99[True] / p99[False], 3), "memory_mb": memory, "peak_mb": memory_mb("VmHWM")}


def beside_others(engine: TorchEngine, schemas: int, with_grammars: bool) -> list[float]:
    """Seconds of each plain request: 16 at a time, as long as the others last."""
    texts = [json_grammar(bomb) for bomb in BOMBS.values()]
    every = max(1, schemas // len(texts))
    for n in range(schemas):
        fields = {f"field {n} {i}": {"type": "string", "maxLength": 5 + i} for i in range(5)}
        texts.insert(n + n // every + 1, json_grammar({"type": "object", "properties": fields}))
    others = iter(enumerate(texts))
    numbers, begun, seconds = itertools.count(), dict[str, float](), list[float]()
    open_others = 0
    left = True
    while left or open_others or len(seconds) < 32:
        plain = [f"plain-{next(numbers)}" for _ in range(16 - len(begun))]
        some = list(itertools.islice(others, 16 - open_others))
        left = bool(some) or open_others > 0
        open_others += len(some)
        begun |= dict.fromkeys(plain, time.perf_counter())
        engine.submit(
            [request(name, 32) for name in plain]
            + [request(f"other-{n}", 12, grammar=text if with_grammars else "") for n, text in some]
        )
        engine.step()
        for delta in engine.take_deltas():
            if delta.finish_reason is not None:
                if delta.request_id in begun:
                    seconds.append(time.perf_counter() - begun.pop(delta.request_id))
                else:
                    open_others -= 1
    engine.abort(list(begun))
    return seconds


def request(name: str, new_tokens: int, **how: Any) -> GenerationRequest:
    sampling = SamplingParameters(max_tokens=new_tokens, seed=hash(name), **how)
    return GenerationRequest(request_id=name, prompt_ids=(5, 6, 7, 8, 9), sampling=sampling)


def memory_mb(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith(field))
