"""pydantic-ai: agents with a tool, with a history, streamed, and with a typed answer: by
a tool's call (its default), by a schema, or asked for in words."""

import asyncio
from typing import Any

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, ModelSettings, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from reporting import MODEL, PERSON, TEMPERATURE, add, finish, headers, report

SETTINGS = ModelSettings(temperature=TEMPERATURE)


class Person(BaseModel):
    name: str
    age: int


def of_chat(session: str) -> Any:
    provider = OpenAIProvider(openai_client=AsyncOpenAI(default_headers=headers(session)))
    return OpenAIChatModel(MODEL, provider=provider, settings=SETTINGS)


def of_responses(session: str) -> Any:
    provider = OpenAIProvider(openai_client=AsyncOpenAI(default_headers=headers(session)))
    return OpenAIResponsesModel(MODEL, provider=provider, settings=SETTINGS)


def of_anthropic(session: str) -> Any:
    provider = AnthropicProvider(anthropic_client=AsyncAnthropic(default_headers=headers(session)))
    return AnthropicModel(MODEL, provider=provider, settings=SETTINGS)


async def use(name: str, model: Any) -> None:
    first = await Agent(model(f"{name}-turns"), instructions="Be brief.").run("Say hello.")
    second = await Agent(model(f"{name}-turns"), instructions="Be brief.").run(
        "And again.", message_history=first.all_messages()
    )
    assert (first.output, second.output) == ("Hello there.", "Hello again.")
    report(f"{name}-turns", first.output, second.output, calls=2)

    async with Agent(model(f"{name}-stream")).run_stream("Say hello.") as result:
        text = "".join([piece async for piece in result.stream_text(delta=True)])
    assert text == "Hello there."
    report(f"{name}-stream", text)

    result = await Agent(model(f"{name}-tools"), tools=[add]).run("Add 2 and 3.")
    assert result.output == "The sum is 5."
    report(f"{name}-tools", result.output, calls=2)

    forms = {"tool": ToolOutput(Person, name="Person"), "prompted": PromptedOutput(Person)}
    if name != "anthropic":
        forms["native"] = NativeOutput(Person)
    for form, kind in forms.items():
        question = "Save Ada." if form == "tool" else "Who is Ada?"
        result = await Agent(model(f"{name}-{form}"), output_type=kind).run(question)
        assert result.output.model_dump() == PERSON, form
        report(f"{name}-{form}")


async def main() -> None:
    await use("chat", of_chat)
    await use("responses", of_responses)
    await use("anthropic", of_anthropic)


asyncio.run(main())
finish()
