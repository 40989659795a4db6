"""openai-agents: its runner with a tool over responses and over chat completions, streamed, a session of turns,
a type of output, and a tool that has to be called."""

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from reporting import MODEL, PERSON, TEMPERATURE, add, finish, headers, report


class Person(BaseModel):
    name: str
    age: int


async def use(name: str, kind: type[OpenAIChatCompletionsModel] | type[OpenAIResponsesModel]) -> None:
    settings = ModelSettings(temperature=TEMPERATURE)

    def agent(session: str) -> Agent:
        client = AsyncOpenAI(default_headers=headers(f"{name}-{session}"))
        model = kind(model=MODEL, openai_client=client)
        tools = [function_tool(add)]
        return Agent(name="Adder", instructions="Be brief.", tools=tools, model=model, model_settings=settings)

    result = await Runner.run(agent("tools"), "Add 2 and 3.")
    assert result.final_output == "The sum is 5."
    report(f"{name}-tools", result.final_output, calls=2)

    result = Runner.run_streamed(agent("stream"), "Add 2 and 3.")
    kinds = [event.type async for event in result.stream_events()]
    assert "raw_response_event" in kinds
    assert result.final_output == "The sum is 5."
    report(f"{name}-stream", result.final_output, calls=2)

    memory = SQLiteSession("turns")
    said = [
        (await Runner.run(agent("turns"), text, session=memory)).final_output for text in ("Say hello.", "And again.")
    ]
    assert said == ["Hello there.", "Hello again."]
    report(f"{name}-turns", *said, calls=2)

    typed = agent("typed").clone(output_type=Person, tools=[])
    assert (await Runner.run(typed, "Who is Ada?")).final_output == Person(**PERSON)
    report(f"{name}-typed")
    both = agent("both").clone(output_type=Person)
    assert (await Runner.run(both, "Who is Ada?")).final_output == Person(**PERSON)
    report(f"{name}-both")
    forced = ModelSettings(temperature=TEMPERATURE, tool_choice="required", parallel_tool_calls=False)
    result = await Runner.run(agent("forced").clone(model_settings=forced), "Add 2 and 3.")
    assert result.final_output == "The sum is 5."
    report(f"{name}-forced", result.final_output, calls=2)


asyncio.run(use("responses", OpenAIResponsesModel))
asyncio.run(use("chat", OpenAIChatCompletionsModel))
finish()
