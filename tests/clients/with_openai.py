"""The openai package: chat completions, completions and responses, and their structured modes."""

import json
from typing import Annotated, Any, Literal

from openai import BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field
from reporting import ADD_PARAMETERS, ADD_TOOL, MODEL, PERSON, TEMPERATURE, add, finish, headers, report

# what every call of chat and responses says
SAMPLED: Any = {"model": MODEL, "temperature": TEMPERATURE}


class Person(BaseModel):
    name: str
    age: int


class Bounded(BaseModel):
    """Small whatever it holds."""

    sign: Literal["+", "-"]
    digits: Annotated[list[Literal[0, 1, 2]], Field(max_length=4)]


def client(session: str) -> OpenAI:
    return OpenAI(default_headers=headers(session))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def chat() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, user("Say hello.")]
    answer = client("plain").chat.completions.create(**SAMPLED, messages=messages)
    assert answer.choices[0].message.content == "Hello there."
    report("plain", answer.choices[0].message.content)

    with client("stream").chat.completions.stream(
        **SAMPLED, messages=messages, stream_options={"include_usage": True}
    ) as events:
        deltas = [event.delta for event in events if event.type == "content.delta"]
        final = events.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content
    assert final.usage is not None
    report("stream", "".join(deltas))

    # what isn't known is answered with nonsense, which has to be exact as well
    both = client("nonsense").chat.completions.create(
        model=MODEL, messages=[user("¿Qué?")], n=2, max_tokens=30, logprobs=True, seed=3
    )
    assert all(choice.logprobs and choice.logprobs.content for choice in both.choices)
    report("nonsense", *(choice.message.content or "" for choice in both.choices))

    talk, texts = [user("Say hello.")], []
    for text in ("And again.", "¿Qué?", "Say hello."):
        said = client("turns").chat.completions.create(**SAMPLED, messages=talk, max_tokens=20).choices[0].message
        texts.append(said.content or "")
        talk += [said.model_dump(exclude_none=True), user(text)]
    report("turns", *texts, calls=3)

    talk = [user("Add 2 and 3.")]
    said = client("tools").chat.completions.create(**SAMPLED, messages=talk, tools=[ADD_TOOL]).choices[0].message
    assert said.tool_calls
    [call] = said.tool_calls
    result = add(**json.loads(call.function.arguments))
    talk += [said.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": str(result)}]
    answer = client("tools").chat.completions.create(**SAMPLED, messages=talk, tools=[ADD_TOOL])
    assert answer.choices[0].message.content == "The sum is 5."
    report("tools", "The sum is 5.", calls=2)

    pieces = client("streamed-tools").chat.completions.create(
        **SAMPLED, messages=talk[:1], tools=[ADD_TOOL], stream=True
    )
    calls = [call for chunk in pieces for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    assert [call.function.name for call in calls if call.function] == ["add"]
    report("streamed-tools")

    answer = client("json").chat.completions.create(**SAMPLED, messages=[user("Who is Ada?")])
    assert json.loads(answer.choices[0].message.content or "") == PERSON
    report("json", answer.choices[0].message.content or "")


def structured() -> None:
    asked: Any = {**SAMPLED, "messages": [user("Who is Ada?")]}
    answer = client("json-object").chat.completions.create(**asked, response_format={"type": "json_object"})
    assert json.loads(answer.choices[0].message.content or "") == PERSON
    report("json-object", answer.choices[0].message.content or "")

    answer = client("parse").chat.completions.parse(**asked, response_format=Person)
    assert answer.choices[0].message.parsed == Person(**PERSON)
    assert answer.choices[0].message.refusal is None
    report("parse", answer.choices[0].message.content or "")
    with client("parse-stream").chat.completions.stream(**asked, response_format=Person) as events:
        final = events.get_final_completion()
    assert final.choices[0].message.parsed == Person(**PERSON)
    report("parse-stream", final.choices[0].message.content or "")
    # what the model doesn't know is in the form all the same
    both = client("parse-nonsense").chat.completions.parse(
        model=MODEL, messages=[user("¿Qué?")], n=2, response_format=Bounded, seed=3
    )
    assert all(isinstance(choice.message.parsed, Bounded) for choice in both.choices)
    report("parse-nonsense", *(choice.message.content or "" for choice in both.choices))

    tool = pydantic_function_tool(Person)
    saved: Any = {**SAMPLED, "messages": [user("Save Ada.")], "tools": [tool]}
    choices: list[Any] = ["auto", "required", {"type": "function", "function": {"name": "Person"}}]
    for number, choice in enumerate(choices):
        session = f"strict-{number}"
        said = client(session).chat.completions.parse(**saved, tool_choice=choice, parallel_tool_calls=False)
        [call] = said.choices[0].message.tool_calls or ()
        assert call.function.parsed_arguments == Person(**PERSON)
        report(session)
    # a call that the model would not make by itself
    forced = {**saved, "messages": [user("Say hello.")]}
    said = client("forced").chat.completions.create(**forced, tool_choice="required", parallel_tool_calls=False)
    [call] = said.choices[0].message.tool_calls or ()
    assert call.function.name == "Person"
    Person.model_validate_json(call.function.arguments)
    report("forced")

    answer = client("response-parse").responses.parse(**SAMPLED, input="Who is Ada?", text_format=Person)
    assert answer.output_parsed == Person(**PERSON)
    report("response-parse", answer.output_text)
    try:
        client("refused").chat.completions.create(**asked, tool_choice="required")
        param = None
    except BadRequestError as error:
        param = error.param
    assert param == "tool_choice"


def completions() -> None:
    prompt = "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n"
    answer = client("completion").completions.create(**SAMPLED, prompt=prompt, max_tokens=20, stop=[" there"])
    assert answer.choices[0].text == "Hello"
    report("completion", "Hello")
    pieces = client("completion-stream").completions.create(**SAMPLED, prompt=prompt, max_tokens=20, stream=True)
    text = "".join(chunk.choices[0].text for chunk in pieces)
    assert text == "Hello there."
    report("completion-stream", text)


def responses() -> None:
    answer = client("response").responses.create(**SAMPLED, instructions="Be brief.", input="Say hello.")
    assert answer.output_text == "Hello there."
    report("response", answer.output_text)
    with client("response-stream").responses.stream(**SAMPLED, input="Say hello.") as events:
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        final = events.get_final_response()
    assert "".join(deltas) == final.output_text == "Hello there."
    report("response-stream", final.output_text)
    tool: Any = {"type": "function", "name": "add", "description": "Adds two numbers.", "parameters": ADD_PARAMETERS}
    items: list[Any] = [user("Say hello.")]
    answer = client("response-turns").responses.create(**SAMPLED, input=items, tools=[tool])
    items += [*answer.output, user("Add 2 and 3.")]
    answer = client("response-turns").responses.create(**SAMPLED, input=items, tools=[tool])
    [call] = answer.output
    assert call.type == "function_call"
    result = str(add(**json.loads(call.arguments)))
    items += [call, {"type": "function_call_output", "call_id": call.call_id, "output": result}]
    answer = client("response-turns").responses.create(**SAMPLED, input=items, tools=[tool])
    assert answer.output_text == "The sum is 5."
    report("response-turns", "Hello there.", "The sum is 5.", calls=3)


assert client("none").models.list().data[0].id == MODEL
chat()
structured()
completions()
responses()
finish()
