"""The anthropic package: messages, whole and streamed, its own runner of tools, and its structured modes."""

from typing import Any

from anthropic import Anthropic, beta_tool
from pydantic import BaseModel
from reporting import ADD_PARAMETERS, ADD_TOOL, MODEL, PERSON, TEMPERATURE, add, finish, headers, report

# this version knows no temperature any more
SAMPLED: Any = {"model": MODEL, "extra_body": {"temperature": TEMPERATURE}}


def client(session: str) -> Anthropic:
    return Anthropic(default_headers=headers(session))


def user(text: str) -> Any:
    return {"role": "user", "content": text}


hello = [user("Say hello.")]
answer = client("plain").messages.create(**SAMPLED, max_tokens=40, system="Be brief.", messages=hello)
assert answer.content[0].text == "Hello there."
report("plain", answer.content[0].text)
counted = client("count").messages.count_tokens(model=MODEL, system="Be brief.", messages=hello)
assert counted.input_tokens == answer.usage.input_tokens

with client("stream").messages.stream(**SAMPLED, max_tokens=40, messages=hello) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == final.content[0].text == "Hello there."
report("stream", text)

talk = [user("Say hello.")]
texts = []
for said in ("And again.", [{"type": "text", "text": "¿Qué?"}], "Say hello."):
    answer = client("turns").messages.create(**SAMPLED, max_tokens=20, messages=talk)
    texts += [block.text for block in answer.content]
    talk += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": said}]
report("turns", *texts, calls=3)

tool: Any = {"name": "add", "description": "Adds two numbers.", "input_schema": ADD_PARAMETERS}
talk = [user("Add 2 and 3.")]
with client("tools").messages.stream(**SAMPLED, max_tokens=60, messages=talk, tools=[tool]) as stream:
    answer = stream.get_final_message()
assert answer.stop_reason == "tool_use"
[block] = answer.content
result = {"type": "tool_result", "tool_use_id": block.id, "content": str(add(**block.input))}
talk += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
answer = client("tools").messages.create(**SAMPLED, max_tokens=60, messages=talk, tools=[tool])
assert answer.content[0].text == "The sum is 5."
report("tools", "The sum is 5.", calls=2)


@beta_tool(name="add", description=ADD_TOOL["function"]["description"])
def addition(a: int, b: int) -> str:
    return str(add(a, b))


runner = client("runner").beta.messages.tool_runner(
    **SAMPLED, max_tokens=60, tools=[addition], messages=[user("Add 2 and 3.")]
)
messages = list(runner)
assert messages[-1].content[0].text == "The sum is 5."
report("runner", "The sum is 5.", calls=2)


class Person(BaseModel):
    name: str
    age: int


answer = client("parse").messages.parse(**SAMPLED, max_tokens=60, messages=[user("Who is Ada?")], output_format=Person)
assert answer.parsed_output == Person(**PERSON)
report("parse", answer.content[0].text)
save: Any = {"name": "Person", "description": "Saves one.", "input_schema": Person.model_json_schema(), "strict": True}
choices: list[Any] = [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "Person"}]
for number, choice in enumerate(choices):
    answer = client(f"forced-{number}").messages.create(
        **SAMPLED, max_tokens=80, messages=[user("Save Ada.")], tools=[tool, save], tool_choice=choice
    )
    assert answer.stop_reason == "tool_use"
    [block] = answer.content
    assert (block.name, block.input) == ("Person", PERSON)
    report(f"forced-{number}")
finish()
