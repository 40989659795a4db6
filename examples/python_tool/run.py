"""Tasks, a random model, a supervised cold start, asynchronous RL with a Python tool in sandboxes, a report.

    python examples/python_tool/run.py --seed 0

Runs each step by the command a user would type, prints it, and skips what an earlier run of the same seed has done.
"""

from __future__ import annotations

import os
from pathlib import Path

from headway.api import Recipe

HERE = Path(__file__).resolve().parent
# Tools aren't shown: there is one, and the model has learned it from the demonstrations.
TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}' -}}
{{- '</tool_call>' -}}
{%- endfor -%}
{{- (message.content or '') + '<|eos|>' -}}
{%- else -%}
{{- message.content + '\\n' -}}
{%- endif -%}
{%- endfor -%}"""


def main() -> None:
    recipe = Recipe.from_arguments("python_tool", __doc__)
    config = os.path.relpath(HERE / "experiment.toml")
    model, keys = recipe.cold_start(config, HERE / "make_tasks.py", template=TEMPLATE)
    if not recipe.options["cold_start_only"]:
        recipe.train(config, model, *keys)


if __name__ == "__main__":
    main()
