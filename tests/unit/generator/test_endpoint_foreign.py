"""Fields of other servers' APIs: refused by name, overridden in a run, or neutral."""

from __future__ import annotations

from typing import Any

import pytest
from endpoint_server import BODY, Served, play
from openai import AsyncOpenAI

ROUTES = ("chat/completions", "completions", "responses", "messages")
FORM: list[tuple[str, Any, Any]] = [  # field, a value that asks for something, one that doesn't
    ("guided_json", {"type": "object"}, None),
    ("guided_regex", "[0-9]+", ""),
    ("guided_choice", ["a", "b"], []),
    ("guided_grammar", "root ::= 'a'", None),
    ("guided_decoding_backend", "xgrammar", None),
    ("structured_outputs", {"regex": "a+"}, {}),
    ("regex", "a+", None),
    ("ebnf", "root ::= 'a'", None),
    ("json_schema", {"type": "object"}, {}),
    ("grammar", "root ::= 'a'", ""),
    ("stop_token_ids", [7], []),
    ("bad_words", ["no"], []),
    ("allowed_token_ids", [1, 2], None),
    ("return_token_ids", True, False),
    ("return_tokens_as_token_ids", True, False),
    ("return_hidden_states", True, False),
    ("echo", True, False),
    ("prompt_logprobs", 0, None),
    ("n_probs", 5, False),
    ("ignore_eos", True, False),
    ("min_tokens", 5, 0),
    ("include_stop_str_in_output", True, False),
    ("skip_special_tokens", False, True),
    ("spaces_between_special_tokens", False, True),
    ("use_beam_search", True, False),
    ("best_of", 4, None),
    ("truncate_prompt_tokens", 5, None),
    ("max_new_tokens", 5, None),
    ("n_predict", 5, None),
    ("chat_template", "{{ messages }}", None),
    ("enable_thinking", True, None),
    ("enable_thinking", False, None),
    ("thinking_budget", 0, None),
    ("think", False, None),
    ("reasoning_effort", "none", "high"),
    ("reasoning", {"enabled": False}, {"effort": "low"}),
    ("reasoning", {"budget_tokens": 0}, {"budget_tokens": 500}),
    ("reasoning", {"effort": "low", "exclude": True}, {"exclude": False}),
    ("lora_path", "x", None),
    ("plugins", [{"id": "web"}], []),
    ("include_reasoning", False, True),
    ("mcp_servers", [{"url": "x"}], []),
]
SAMPLED: list[tuple[str, Any, Any]] = [
    ("min_p", 0.1, 0),
    ("min_p", 0.1, 0.0),
    ("length_penalty", 1.5, 1.0),
    ("repetition_penalty", 1.2, 1),
    ("frequency_penalty", 0.2, 0.0),
    ("typical_p", 0.5, 1.0),
    ("mirostat", 2, 0),
    ("no_repeat_ngram_size", 2, 0),
    ("do_sample", False, True),
    ("top_a", 0.2, 0),
]


def body_of(route: str, **further: Any) -> dict[str, Any]:
    given = {"completions": {"prompt": "1+2"}, "responses": {"input": "hi"}}.get(route, {"messages": BODY["messages"]})
    return {"model": "headway", "max_tokens": 4, **given, **further}


@pytest.mark.parametrize("route", ROUTES)
def test_what_changes_the_answers_form_is_refused_by_name_unless_it_is_neutral(route: str) -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        # of Anthropic's own fields, where disabled is the default
        thinking = [] if route == "messages" else [("thinking", {"type": "disabled"}, {"type": "enabled"})]
        for name, asked, neutral in FORM + thinking:
            status, _, answer = await server.post(f"/v1/{route}", body_of(route, **{name: asked}))
            assert status == 400, name
            assert answer["error"]["message"].startswith(name), answer
            assert route == "messages" or answer["error"]["param"] == name
            for value in (neutral, None):
                status, _, answer = await server.post(f"/v1/{route}", body_of(route, **{name: value}))
                assert status == 200, (name, value, answer)

    play(test)


@pytest.mark.parametrize("route", ROUTES)
def test_other_ways_of_sampling_are_overridden_in_a_run_and_said_once(route: str) -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        for name, asked, neutral in SAMPLED:
            for value in (asked, asked, neutral, None):
                status, _, answer = await server.post(f"/v1/{route}", body_of(route, **{name: value}))
                assert status == 200, (name, value, answer)
        said = [detail for name, detail in server.events if name == "client_sampling"]
        names = {name for name, _, _ in SAMPLED}
        assert len(said) == len(names)
        assert all(any(f"{name} = " in detail for detail in said) for name in names)

    play(test)


@pytest.mark.parametrize("route", ROUTES)
def test_other_ways_of_sampling_are_refused_where_sampling_is_the_clients(route: str) -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        server.session.fixed_sampling = False
        for name, asked, neutral in SAMPLED:
            status, _, answer = await server.post(f"/v1/{route}", body_of(route, **{name: asked}))
            assert status == 400, name
            assert answer["error"]["message"].startswith(name)
            status, _, answer = await server.post(f"/v1/{route}", body_of(route, **{name: neutral}))
            assert status == 200, (name, neutral, answer)

    play(test)


@pytest.mark.parametrize("route", ROUTES)
def test_what_changes_nothing_is_ignored(route: str) -> None:
    further = {"metadata": {"a": "b"}, "user": "u", "store": False, "service_tier": "auto", "cache_prompt": True}

    async def test(server: Served, client: AsyncOpenAI) -> None:
        status, _, answer = await server.post(f"/v1/{route}", body_of(route, **further))
        assert status == 200, answer

    play(test)
