"""inspect_ai: evaluations over a data set in memory, with and without a tool, through three of its providers."""

import os

from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import GenerateConfig, ModelOutput, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, system_message, use_tools, user_message
from inspect_ai.tool import Tool, tool
from reporting import ANTHROPIC_URL, MODEL, OPENAI_URL, TEMPERATURE, add, finish, headers, report


@tool(name="add")
def addition() -> Tool:
    async def execute(a: int, b: int) -> str:
        """Adds two numbers.

        Args:
            a: the first
            b: the second
        """
        return str(add(a, b))

    return execute


def answers(name: str, task: Task, model: str, url: str, **arguments: bool) -> list[ModelOutput]:
    config = GenerateConfig(extra_headers=headers(name), max_tokens=60, temperature=TEMPERATURE)
    asked = get_model(model, base_url=url, api_key="any", config=config, memoize=False, **arguments)
    [log] = evaluate(task, model=asked, display="none", log_dir=os.environ["HEADWAY_SCRATCH"])
    assert log.status == "success", log.error
    assert log.results is not None
    assert log.results.scores[0].metrics["accuracy"].value == 1.0
    assert log.samples is not None
    return [sample.output for sample in log.samples]


hello = MemoryDataset([Sample("Say hello.", target="Hello there."), Sample("Who is Ada?", target="36")])
plain = Task(dataset=hello, solver=[system_message("Be brief."), generate()], scorer=includes())
turns = Task(
    dataset=MemoryDataset([Sample("Say hello.", target="Hello again.")]),
    solver=[generate(), user_message("And again."), generate()],
    scorer=includes(),
)
sums = Task(
    dataset=MemoryDataset([Sample("Add 2 and 3.", target="The sum is 5.")]),
    solver=[use_tools(addition()), generate()],
    scorer=includes(),
)
for name, model, url, arguments in (
    ("chat", f"openai-api/local/{MODEL}", OPENAI_URL, {}),
    ("stream", f"openai-api/local/{MODEL}", OPENAI_URL, {"stream": True}),
    ("responses", f"openai-api/local/{MODEL}", OPENAI_URL, {"responses_api": True}),
    ("anthropic", f"anthropic/{MODEL}", ANTHROPIC_URL, {}),
):
    outputs = answers(f"{name}-plain", plain, model, url, **arguments)
    report(f"{name}-plain", *(output.completion for output in outputs), calls=2)
    [output] = answers(f"{name}-turns", turns, model, url, **arguments)
    report(f"{name}-turns", output.completion, calls=2)
    [output] = answers(f"{name}-tools", sums, model, url, **arguments)
    report(f"{name}-tools", output.completion, calls=2)
finish()
