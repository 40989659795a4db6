"""smolagents: its model alone, whole and streamed, and an agent that calls a tool until it has the final answer."""

from reporting import MODEL, TEMPERATURE, add, finish, headers, report
from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool
from smolagents.models import ChatMessage, MessageRole


def model(session: str) -> OpenAIModel:
    return OpenAIModel(
        MODEL,
        client_kwargs={"default_headers": headers(session)},
        max_tokens=80,
        temperature=TEMPERATURE,
    )


def user(text: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": text}])


talk = [user("Say hello.")]
answer = model("turns").generate(talk)
assert answer.content == "Hello there."
talk += [ChatMessage(role=MessageRole.ASSISTANT, content=answer.content), user("And again.")]
answer = model("turns").generate(talk)
assert answer.content == "Hello again."
report("turns", "Hello there.", "Hello again.", calls=2)

text = "".join(delta.content or "" for delta in model("stream").generate_stream(talk[:1]))
assert text == "Hello there."
report("stream", text)

for session, stream in (("agent", False), ("agent-stream", True)):
    agent = ToolCallingAgent(
        tools=[tool(add)], model=model(session), stream_outputs=stream, verbosity_level=LogLevel.OFF, max_steps=4
    )
    answer = agent.run("Add 2 and 3.")
    assert answer == "5", answer
    report(session, calls=2)
finish()
