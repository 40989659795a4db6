"""langchain: ChatOpenAI (chat, responses) and ChatAnthropic; whole, streamed, in turns, with tools, with a parser,
and their structured modes."""

from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.output_parsers import PydanticOutputParser
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from reporting import ANTHROPIC_URL, MODEL, PERSON, TEMPERATURE, add, finish, headers, report


class Person(BaseModel):
    name: str
    age: int


addition = tool("add")(add)
SAMPLED: Any = {"temperature": TEMPERATURE}


def of_openai(session: str) -> Any:
    return ChatOpenAI(model=MODEL, **SAMPLED, default_headers=headers(session))


def of_responses(session: str) -> Any:
    return ChatOpenAI(
        model=MODEL,
        temperature=TEMPERATURE,
        default_headers=headers(session),
        use_responses_api=True,
        output_version="v1",
    )


def of_anthropic(session: str) -> Any:
    return ChatAnthropic(
        model_name=MODEL,
        temperature=TEMPERATURE,
        base_url=ANTHROPIC_URL,
        default_headers=headers(session),
        timeout=None,
        stop=None,
    )


def use(name: str, chat: Any) -> None:
    talk: list[Any] = [SystemMessage("Be brief."), HumanMessage("Say hello.")]
    answer = chat(f"{name}-turns").invoke(talk)
    assert answer.text == "Hello there."
    talk += [answer, HumanMessage("And again.")]
    assert chat(f"{name}-turns").invoke(talk).text == "Hello again."
    report(f"{name}-turns", "Hello there.", "Hello again.", calls=2)

    text = "".join(chunk.text for chunk in chat(f"{name}-stream").stream(talk[:2]))
    assert text == "Hello there."
    report(f"{name}-stream", text)

    model = chat(f"{name}-tools").bind_tools([addition])
    talk = [HumanMessage("Add 2 and 3.")]
    answer = model.invoke(talk)
    [call] = answer.tool_calls
    talk += [answer, addition.invoke(call)]
    assert model.invoke(talk).text == "The sum is 5."
    report(f"{name}-tools", "The sum is 5.", calls=2)

    chain = chat(f"{name}-parser") | PydanticOutputParser(pydantic_object=Person)
    assert chain.invoke("Who is Ada?").model_dump() == PERSON
    report(f"{name}-parser")

    texts = [answer.text for answer in chat(f"{name}-batch").batch(["Say hello."] * 3)]
    report(f"{name}-batch", *texts, calls=3)


def structured(name: str, chat: Any, methods: tuple[str, ...]) -> None:
    for method in methods:
        session = f"{name}-{method}"
        question = "Save Ada." if method == "function_calling" else "Who is Ada?"
        model = chat(session).with_structured_output(Person, method=method)
        assert model.invoke(question).model_dump() == PERSON, session
        report(session)
    model = chat(f"{name}-forced").bind_tools([Person], tool_choice="any")
    [call] = model.invoke("Save Ada.").tool_calls
    assert call["args"] == PERSON
    report(f"{name}-forced")


use("openai", of_openai)
use("responses", of_responses)
use("anthropic", of_anthropic)
structured("openai", of_openai, ("function_calling", "json_schema", "json_mode"))
structured("responses", of_responses, ("function_calling", "json_schema"))
structured("anthropic", of_anthropic, ("function_calling", "json_schema"))
finish()
