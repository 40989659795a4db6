"""instructor: typed answers, their retries, and its streams of partial objects, in modes that force a tool's call (its
default), ask for a schema, or ask in words."""

from typing import Any

import instructor
from instructor.core import IncompleteOutputException
from openai import OpenAI
from pydantic import BaseModel, field_validator
from reporting import MODEL, PERSON, TEMPERATURE, finish, headers, report

ASKED: Any = {
    "model": MODEL,
    "temperature": TEMPERATURE,
    "messages": [{"role": "user", "content": "Who is Ada?"}],
}


class Person(BaseModel):
    name: str
    age: int


class Picky(Person):
    """Takes no answer but the second."""

    @field_validator("age")
    @classmethod
    def second(cls, age: int) -> int:
        looked.append(age)
        if len(looked) == 1:
            raise ValueError("look again")
        return age


def client(session: str) -> instructor.Instructor:
    return instructor.from_openai(OpenAI(default_headers=headers(session)), mode=instructor.Mode.MD_JSON)


looked: list[int] = []
person, answer = client("plain").create_with_completion(**ASKED, response_model=Person)
assert person.model_dump() == PERSON
report("plain", answer.choices[0].message.content)

*_, person = client("stream").create_partial(**ASKED, response_model=Person)
assert person.model_dump() == PERSON
report("stream")

picky = client("retry").create(**ASKED, response_model=Picky, max_retries=2)
assert picky.model_dump() == PERSON
assert len(looked) == 2
report("retry", calls=2)

try:
    client("cut").create(**ASKED, response_model=Person, max_retries=2, max_tokens=8)
except IncompleteOutputException:
    report("cut")
else:
    raise AssertionError("an answer that was cut passed for a whole one")

SAVED: Any = {**ASKED, "messages": [{"role": "user", "content": "Save Ada."}]}
forced = instructor.from_openai(OpenAI(default_headers=headers("forced")))
assert forced.create(**SAVED, response_model=Person, max_retries=1).model_dump() == PERSON
report("forced")
for name, mode, asked in (
    ("strict", instructor.Mode.TOOLS_STRICT, SAVED),
    ("schema", instructor.Mode.JSON_SCHEMA, ASKED),
    ("object", instructor.Mode.JSON, ASKED),
):
    typed = instructor.from_openai(OpenAI(default_headers=headers(name)), mode=mode)
    assert typed.create(**asked, response_model=Person, max_retries=1).model_dump() == PERSON, name
    report(name)
finish()
