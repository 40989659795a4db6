"""litellm: OpenAI's chat, completions and responses and Anthropic's messages, through its own functions."""

import asyncio
import json
from typing import Any

import litellm
from pydantic import BaseModel
from reporting import ADD_TOOL, ANTHROPIC_URL, MODEL, OPENAI_URL, PERSON, TEMPERATURE, add, finish, headers, report


class Person(BaseModel):
    name: str
    age: int


HELLO = [{"role": "user", "content": "Say hello."}]
# (name, its model, its address)
PROVIDERS = (("openai", f"openai/{MODEL}", OPENAI_URL), ("anthropic", f"anthropic/{MODEL}", ANTHROPIC_URL))


def with_provider(name: str, model: str, url: str) -> None:
    def asked(session: str, messages: Any, **options: Any) -> Any:
        where: Any = {"model": model, "api_base": url, "api_key": "any", "temperature": TEMPERATURE}
        return litellm.completion(
            **where, messages=messages, extra_headers=headers(f"{name}-{session}"), max_tokens=60, **options
        )

    answer = asked("plain", [{"role": "system", "content": "Be brief."}, *HELLO])
    assert answer.choices[0].message.content == "Hello there."
    report(f"{name}-plain", "Hello there.")
    text = "".join(chunk.choices[0].delta.content or "" for chunk in asked("stream", HELLO, stream=True))
    assert text == "Hello there."
    report(f"{name}-stream", text)
    talk: list[Any] = [{"role": "user", "content": "Add 2 and 3."}]
    said = asked("tools", talk, tools=[ADD_TOOL]).choices[0].message
    [call] = said.tool_calls
    result = str(add(**json.loads(call.function.arguments)))
    talk += [said, {"role": "tool", "tool_call_id": call.id, "content": result}]
    said = asked("tools", talk, tools=[ADD_TOOL]).choices[0].message
    assert said.content == "The sum is 5."
    talk += [said, {"role": "user", "content": "And again."}]
    said = asked("tools", talk, tools=[ADD_TOOL]).choices[0].message
    assert said.content == "Hello again."
    report(f"{name}-tools", "The sum is 5.", "Hello again.", calls=3)
    who = [{"role": "user", "content": "Who is Ada?"}]
    if name == "openai":
        said = asked("schema", who, response_format=Person).choices[0].message
        assert json.loads(said.content) == PERSON
        report(f"{name}-schema", said.content)
    for session, choice in (("required", "required"), ("named", {"type": "function", "function": {"name": "add"}})):
        said = asked(session, talk[:1], tools=[ADD_TOOL], tool_choice=choice).choices[0].message
        assert [call.function.name for call in said.tool_calls][:1] == ["add"]
        report(f"{name}-{session}")


async def several() -> None:
    where: Any = {"model": f"openai/{MODEL}", "temperature": TEMPERATURE, "api_base": OPENAI_URL, "api_key": "any"}
    calls = (litellm.acompletion(**where, messages=HELLO, extra_headers=headers("many")) for _ in range(4))
    texts = [answer.choices[0].message.content for answer in await asyncio.gather(*calls)]
    report("many", *texts, calls=4)


for provider in PROVIDERS:
    with_provider(*provider)
asyncio.run(several())
prompt = "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n"
answer = litellm.text_completion(
    model=f"text-completion-openai/{MODEL}",
    prompt=prompt,
    api_base=OPENAI_URL,
    temperature=TEMPERATURE,
    extra_headers=headers("completion"),
)
assert answer.choices[0].text == "Hello there."
report("completion", "Hello there.")
answer = litellm.responses(
    model=f"openai/{MODEL}",
    input="Say hello.",
    api_base=OPENAI_URL,
    temperature=TEMPERATURE,
    extra_headers=headers("response"),
)
assert answer.output[0].content[0].text == "Hello there."
report("response", "Hello there.")
finish()
