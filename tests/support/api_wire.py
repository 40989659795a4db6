"""What a request of OpenAI's or Anthropic's API asks for and what its response says, read from the bytes on the wire
without any of the endpoint's own code: the conversation as the chat template takes it, and the answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from wire_tap import Exchange


@dataclass(frozen=True)
class Answer:
    """An answer as a client reads it."""

    text: str
    calls: tuple[tuple[str, Any], ...] = ()  # name and arguments of each tool call


@dataclass(frozen=True)
class WireCall:
    """An answered call."""

    session: str
    prompt: str | None  # of completions, which have no messages
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    temperature: float
    stop: tuple[str, ...]
    answers: tuple[Answer, ...]


def wire_call(exchange: Exchange) -> WireCall | None:
    """The call that an exchange was; None: it was another request, or got no answer."""
    route = exchange.path.partition("?")[0]
    if route not in _ROUTES or exchange.status != 200:
        return None
    conversation, answers_of, stop = _ROUTES[route]
    body = json.loads(exchange.body)
    stops = body.get(stop) or ()
    return WireCall(
        session=exchange.headers.get("x-session-id", ""),
        prompt=body.get("prompt"),
        messages=tuple(conversation(body)),
        tools=tuple(tool for given in body.get("tools") or () for tool in _tools(given)),
        temperature=1.0 if body.get("temperature") is None else body["temperature"],
        stop=(stops,) if isinstance(stops, str) else tuple(stops),
        answers=tuple(answers_of(exchange)),
    )


def _tools(tool: dict[str, Any]) -> list[dict[str, Any]]:
    """A function, those of a namespace, or none, of a hosted tool."""
    if tool.get("type") != "namespace":
        return [_tool(tool)] if "name" in tool or "function" in tool else []
    about = tool.get("description") or ""
    found = [_tool(inner)["function"] for inner in tool["tools"]]
    described = [{**one, "description": "\n".join(filter(None, (about, one["description"])))} for one in found]
    return [{"function": {**one, "name": f"{tool['name']}__{one['name']}"}} for one in described]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    given = tool.get("function", tool)
    parameters = given.get("parameters") or given.get("input_schema") or {}
    description = given.get("description") or ""
    return {"function": {"name": given["name"], "description": description, "parameters": parameters}}


def _text(content: Any) -> str:
    """Content as a text or in parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content)


def _call(name: str, arguments: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}}


# --- requests ----------------------------------------------------------------------------------------------------


def _chat(body: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for message in body["messages"]:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        role = "system" if message["role"] == "developer" else message["role"]
        entry = {"role": role, "content": _text(message.get("content"))}
        found.append({**entry, "tool_calls": [_call(c["name"], json.loads(c["arguments"])) for c in calls]})
    return found


def _responses(body: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if body.get("instructions"):
        found.append({"role": "system", "content": body["instructions"]})
    items = body["input"]
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
        kind = item.get("type", "message")
        if kind == "message":
            role = "system" if item["role"] == "developer" else item["role"]
            found.append({"role": role, "content": _text(item["content"])})
        elif kind == "function_call":
            if found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": ""})
            calls = found[-1].setdefault("tool_calls", [])
            calls.append(_call(item["name"], json.loads(item["arguments"])))
        else:
            assert kind == "function_call_output", kind
            found.append({"role": "tool", "content": _text(item["output"])})
    return found


def _anthropic(body: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if body.get("system"):
        found.append({"role": "system", "content": _text(body["system"])})
    for message in body["messages"]:
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        results = [block for block in blocks if block["type"] == "tool_result"]
        failed = ("error: " if block.get("is_error") else "" for block in results)
        texts = (_text(block.get("content")) for block in results)
        found += [{"role": "tool", "content": error + text} for error, text in zip(failed, texts, strict=True)]
        texts = [block for block in blocks if block["type"] == "text"]
        calls = [_call(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
        if texts or calls or not results:
            found.append({"role": message["role"], "content": _text(texts), "tool_calls": calls})
    return found


# --- answers -----------------------------------------------------------------------------------------------------


def _streamed(exchange: Exchange) -> list[dict[str, Any]] | None:
    """The data of a stream's events; None: the response is whole."""
    if "text/event-stream" not in exchange.answer_headers["content-type"]:
        return None
    data = [line[6:] for line in exchange.answer.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(entry) for entry in data if entry != "[DONE]"]


def _chat_answers(exchange: Exchange) -> list[Answer]:
    chunks = _streamed(exchange)
    if chunks is None:
        chunks = [json.loads(exchange.answer)]
    texts: dict[int, str] = {}
    calls: dict[int, list[tuple[str, Any]]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        number = choice["index"]
        texts[number] = texts.get(number, "") + (said.get("content") or "")
        for call in said.get("tool_calls") or ():
            function = call["function"]
            calls.setdefault(number, []).append((function["name"], json.loads(function["arguments"])))
    return [Answer(texts[number], tuple(calls.get(number, ()))) for number in sorted(texts)]


def _response_answers(exchange: Exchange) -> list[Answer]:
    events = _streamed(exchange)
    whole = json.loads(exchange.answer) if events is None else events[-1]["response"]
    text, calls = "", []
    for item in whole["output"]:
        if item["type"] == "function_call":
            calls.append((item["name"], json.loads(item["arguments"])))
        else:
            text += _text(item["content"])
    if events is not None:
        assert text == "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    return [Answer(text, tuple(calls))]


def _anthropic_answers(exchange: Exchange) -> list[Answer]:
    events = _streamed(exchange)
    blocks: list[dict[str, Any]] = []
    if events is None:
        blocks = json.loads(exchange.answer)["content"]
    for event in events or ():
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[event["index"]]["json"] += delta.get("partial_json", "")
            if "text" in delta:
                blocks[event["index"]]["text"] += delta["text"]
    calls = [(b["name"], json.loads(b["json"]) if b.get("json") else b["input"]) for b in blocks if b["type"] != "text"]
    return [Answer(_text([block for block in blocks if block["type"] == "text"]), tuple(calls))]


# route -> (its conversation, its answers, its field of stop strings)
_ROUTES: dict[str, tuple[Any, Any, str]] = {
    "/v1/chat/completions": (_chat, _chat_answers, "stop"),
    "/v1/completions": (lambda body: (), _chat_answers, "stop"),
    "/v1/responses": (_responses, _response_answers, "stop"),
    "/v1/messages": (_anthropic, _anthropic_answers, "stop_sequences"),
}
