"""Chat templates that write tool calls: those of published models that the package trl has, and shapes of others."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import real_tokenizers
from scratch_folders import scratch_folder
from tokenizers import Tokenizer as Backend

from headway.tokens.tokenizer import Tokenizer

_MARK = re.compile(r"<\|[^<>|\s{}]+\|?>|<[a-z_]+\|>|<｜[^<>\s{}]+?｜>|\[/?[A-Z_]+\]|<\|\"\|>")


def published_templates() -> dict[str, str]:
    """Templates of published models by the name of their file, those for training too."""
    spec = importlib.util.find_spec("trl")  # which isn't imported: it needs what isn't here
    if spec is None or spec.origin is None:
        return {}
    files = sorted((Path(spec.origin).parent / "chat_templates").glob("*.jinja"))
    return {file.stem: file.read_text(encoding="utf-8") for file in files}


@cache
def _folder(kind: str) -> Path:
    folder = scratch_folder("call-templates")
    real_tokenizers.write(kind, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder


@cache
def tokenizer_with(template: str, kind: str = "qwen", special: bool = False) -> Tokenizer:
    """A tokenizer of a published kind with another chat template; ``special``: the template's marks are special tokens
    of it."""
    made = scratch_folder("call-template")
    for file in _folder(kind).iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    settings = json.loads((made / "tokenizer_config.json").read_text())
    (made / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    if special:
        backend = Backend.from_file(str(made / "tokenizer.json"))
        backend.add_special_tokens(list(dict.fromkeys(_MARK.findall(template))))
        backend.save(str(made / "tokenizer.json"))
    return Tokenizer.load(made)


def _shape(calls: str, text: str = "{{ m.content }}") -> str:
    """A template in ChatML, whose turns with calls end in ``calls``."""
    return (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
        "{%- if m.role == 'assistant' %}{%- if m.content %}" + text + "{%- endif %}"
        "{%- if m.tool_calls %}" + calls + "{%- endif %}"
        "{%- else %}{{- m.content }}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )


_EACH, _END = "{%- for c in m.tool_calls %}{%- set f = c.function %}", "{%- endfor %}"
_JSON = "{{- '{\"name\": \"' + f.name + '\", \"arguments\": ' + f.arguments | tojson + '}' }}"
_COMMA = "{%- if not loop.last %}{{- ', ' }}{%- endif %}"
_ITEMS = "{%- for k, v in f.arguments.items() %}"
_VALUE = "(v if v is string else v | tojson)"


def _tagged(before: str, body: str, behind: str) -> str:
    return _shape(f"{_EACH}{{{{- '{before}' }}}}{body}{{{{- '{behind}' }}}}{_END}")


def _list(opening: str, body: str, closing: str) -> str:
    return _shape(f"{{{{- '{opening}' }}}}{_EACH}{body}{_COMMA}{_END}{{{{- '{closing}' }}}}")


SHAPES: Mapping[str, str] = {
    "JSON in other tags": _tagged("\\n<call_tool>", _JSON, "</call_tool>"),
    "JSON behind a mark": _tagged("<|plugin|>", _JSON, "<|end_plugin|>"),
    "list in tags": _list("<TOOLCALL>[", _JSON, "]</TOOLCALL>"),
    "list behind a mark": _list("<|tool_call|>[", _JSON, "]"),
    "bare list": _list("[", _JSON, "]"),
    "bare object": _shape("{%- set f = m.tool_calls[0].function %}" + _JSON),
    "object with a type": _tagged(
        "<tool>",
        '{{- \'{"type": "function", "function": {"name": "\' + f.name + \'", "parameters": \' '
        "+ f.arguments | tojson + '}}' }}",
        "</tool>",
    ),
    "arguments before the name": _tagged(
        "<tool>", "{{- '{\"args\": ' + f.arguments | tojson + ', \"tool\": \"' + f.name + '\"}' }}", "</tool>"
    ),
    "Mistral 7B": _shape(
        "{{- '[TOOL_CALLS][' }}"
        + _EACH
        + "{%- if c.id | length != 9 %}{{ raise_exception('nine letters and digits!') }}{%- endif %}"
        + '{{- \'{"name": "\' + f.name + \'", "arguments": \' + f.arguments | tojson + \', "id": "\' + c.id + \'"}\' }}'
        + _COMMA
        + _END
        + "{{- ']' }}"
    ),
    "Mistral Small": _tagged(
        "[TOOL_CALLS]", "{{- f.name + '[CALL_ID]' + c.id + '[ARGS]' + f.arguments | tojson }}", ""
    ),
    "Magistral": _tagged("[TOOL_CALLS]", "{{- f.name + '[ARGS]' + f.arguments | tojson }}", ""),
    "DeepSeek V3.1": _shape(
        "{{- '<｜tool▁calls▁begin｜>' }}"
        + _EACH
        + "{{- '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + f.arguments | tojson + '<｜tool▁call▁end｜>' }}"
        + _END
        + "{{- '<｜tool▁calls▁end｜>' }}"
    ),
    "DeepSeek V3.2": _shape(
        "{{- '\\n\\n<｜DSML｜function_calls>\\n' }}"
        + _EACH
        + "{{- '<｜DSML｜invoke name=\"' + f.name + '\">\\n' }}"
        + _ITEMS
        + "{{- '<｜DSML｜parameter name=\"' + k + '\" string=\"' + ('true' if v is string else 'false') + '\">' + "
        + _VALUE
        + " + '</｜DSML｜parameter>\\n' }}{%- endfor %}{{- '</｜DSML｜invoke>\\n' }}"
        + _END
        + "{{- '</｜DSML｜function_calls>' }}"
    ),
    "Kimi": _shape(
        "{{- '<|tool_calls_section_begin|>' }}"
        + _EACH
        + "{{- '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' + f.arguments | tojson }}"
        + "{{- '<|tool_call_end|>' }}"
        + _END
        + "{{- '<|tool_calls_section_end|>' }}"
    ),
    "Command R7B": _shape(
        "{{- '<|START_ACTION|>[\\n' }}"
        + _EACH
        + '{{- \'    {"tool_call_id": "\' + loop.index0 | string + \'", "tool_name": "\' + f.name + '
        + "'\", \"parameters\": ' + f.arguments | tojson + '}' }}{%- if not loop.last %}{{- ',\\n' }}{%- endif %}"
        + _END
        + "{{- '\\n]<|END_ACTION|>' }}",
        "{{- '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}",
    ),
    "MiniMax M2": _shape(
        "{{- '\\n<minimax:tool_call>\\n' }}"
        + _EACH
        + "{{- '<invoke name=\"' + f.name + '\">\\n' }}"
        + _ITEMS
        + "{{- '<parameter name=\"' + k + '\">' + "
        + _VALUE
        + " + '</parameter>\\n' }}{%- endfor %}{{- '</invoke>\\n' }}"
        + _END
        + "{{- '</minimax:tool_call>' }}"
    ),
    "other XML": _tagged(
        "<use>",
        "{{- '<name>' + f.name + '</name>' }}" + _ITEMS + "{{- '<arg k=' + k + '>' + " + _VALUE + " + '</arg>' }}"
        "{%- endfor %}",
        "</use>",
    ),
    "GLM 4.7": _tagged(
        "<tool_call>",
        "{{- f.name }}" + _ITEMS + "{{- '<arg_key>' + k + '</arg_key><arg_value>' + " + _VALUE + " + '</arg_value>' }}"
        "{%- endfor %}",
        "</tool_call>",
    ),
    "Seed": _tagged(
        "\\n<seed:tool_call>\\n",
        "{{- '<function=' + f.name + '>\\n' }}"
        + _ITEMS
        + "{{- '<parameter=' + k + '>' + "
        + _VALUE
        + " + '</parameter>\\n' }}{%- endfor %}{{- '</function>\\n' }}",
        "</seed:tool_call>",
    ),
    "function with JSON": _tagged("<function=", "{{- f.name + '>' + f.arguments | tojson }}", "</function>"),
    "Hunyuan": _shape(
        "{{- '<tool_calls>\\n' }}"
        + _EACH
        + "{{- '<tool_call>' + f.name + '<tool_sep>\\n```json\\n' + f.arguments | tojson + '\\n```</tool_call>\\n' }}"
        + _END
        + "{{- '</tool_calls>' }}"
    ),
    "Solar": _tagged(
        "<|tool_call:begin|>",
        "{{- c.id + '<|tool_call:name|>' + f.name + '<|tool_call:args|>' + f.arguments | tojson }}",
        "<|tool_call:end|>",
    ),
    "FunctionGemma": _tagged(
        "<start_function_call>call:",
        "{{- f.name + '{' }}"
        + _ITEMS
        + "{{- k + ':' + ('<escape>' + v + '<escape>' if v is string else v | tojson) }}"
        + _COMMA
        + "{%- endfor %}{{- '}' }}",
        "<end_function_call>",
    ),
    "Python list": _list(
        "[",
        "{{- f.name + '(' }}" + _ITEMS + "{{- k + '=' + v | tojson }}" + _COMMA + "{%- endfor %}{{- ')' }}",
        "]",
    ),
    "quoted attributes": _shape(
        "{{- '<calls>' }}"
        + _EACH
        + "{{- '<call tool=\"' + f.name + '\">' }}"
        + _ITEMS
        + "{{- '<arg name=\"' + k + '\">' + v | tojson + '</arg>' }}{%- endfor %}{{- '</call>' }}"
        + _END
        + "{{- '</calls>' }}"
    ),
}
