"""docs/configuration.md is what the schema says today, and every key in it means something."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from code_figures import PACKAGE, trees

from docs.write_configuration import reference
from headway.config.load import flatten, validate_experiment

CONFIG = Path(__file__).parents[3] / "headway" / "config"
TUNED = {  # those that nearly every run has to choose
    "rollout": "group_size max_response_tokens temperature",
    "generator": "engine devices slots update_mode",
    "queue": "groups_per_step budget overdue",
    "algorithm": "loss clip_low clip_high kl_coefficient aggregation",
    "trainer": "devices learning_rate micro_batch_tokens optimizer_steps_per_batch",
}
PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"
ROW = re.compile(
    r"^\| `(?P<key>[\w.]+)`(?P<mark> ↻)? \| (?P<valid>.*) \| (?P<default>[^|]*) \| (?P<meaning>.*) \|$", re.M
)


@functools.cache
def parts() -> list[str]:
    return reference().split("\n## ")


def rows_of(section: str) -> dict[str, re.Match[str]]:
    part = next(part for part in parts() if f"`[{section}]`" in part.splitlines()[0])
    return {row["key"]: row for row in ROW.finditer(part)}


def test_page_is_up_to_date():
    command = "python -m docs.write_configuration > docs/configuration.md"
    assert PAGE.read_text(encoding="utf-8") == reference(), f"run: {command}"


def test_every_key_of_every_section_is_explained():
    source = {"path": "tasks.jsonl"}
    raw = {"run": {"directory": "run"}, "model": {"path": "model"}, "tasks": {"train": source}}
    for key in flatten(validate_experiment(raw, "example")):
        section, _, name = key.rpartition(".")
        if section in ("tasks", ""):  # a whole optional section, explained in the list above the table or below a title
            continue
        if section.endswith((".columns", ".limits", ".parameters")):  # a table inside the section
            section, _, table = section.rpartition(".")
            name = f"{table}.{name}"
        assert rows_of(section)[name]["meaning"].strip(), f"{key} has no comment in headway/config/schema.py"


def test_every_row_has_a_meaning_and_a_default():
    rows = list(ROW.finditer(reference()))
    assert len(rows) == len(re.findall(r"^\| `", reference(), re.M)) <= 367
    empty = [row["key"] for row in rows if not (re.search(r"[a-z]{3}", row["meaning"]) and row["default"].strip())]
    assert empty == []


def test_the_page_begins_with_twenty_keys():
    begun = parts()[1]
    assert begun.startswith("The twenty keys that matter")
    assert len(re.findall(r"^- \[`[\w.]+`\]\(#[\w-]+\): \S", begun, re.M)) == 20


def test_keys_that_are_tuned_say_when():
    """A line ``# Tune:`` above a field that the page lacks stands in the wrong place."""
    told = re.findall(r"<em>", reference())
    written = [line for file in CONFIG.rglob("*.py") for line in file.read_text().splitlines() if "# Tune: " in line]
    assert len(told) == len(written) >= 50
    for section, keys in TUNED.items():
        assert [key for key in keys.split() if "<em>" not in rows_of(section)[key]["meaning"]] == []


def test_units_follow_from_the_key():
    assert rows_of("run")["time_limit_s"]["valid"] == "number > 0 (seconds)"
    assert rows_of("router")["requests_per_s"]["valid"] == "number > 0 (per second)"
    assert rows_of("rollout")["max_response_tokens"]["valid"] == "integer ≥ 1 (tokens)"
    assert rows_of("queue")["budget"]["valid"] == "integer ≥ 0"


def test_reference_shows_limits_choices_defaults_and_resumability():
    rate = rows_of("algorithm")["clip_low"]
    assert (rate["valid"], rate["default"], rate["mark"]) == ("number > 0, < 1", "`0.2`", None)
    assert rows_of("queue")["overdue"]["valid"] == r"`wait` \| `drop` \| `mask`"
    assert rows_of("algorithm")["token_mask"]["valid"] == "[number ≥ 0, number > 0]"
    assert rows_of("run")["directory"]["default"] == "**required**"
    assert rows_of("run")["time_limit_s"]["default"] == "*unset*"
    assert rows_of("generator")["devices"]["valid"] == r"list of text \| `auto`"
    assert rows_of("generator")["slots"]["mark"] == " ↻"
    marks = {key: row["mark"] for key, row in rows_of("environment").items() if key.startswith("models.")}
    assert (marks["models.address"], marks["models.model"]) == (" ↻", None)
    assert rows_of("tasks.validation").keys() == rows_of("tasks.train").keys()


# Names with a point in them that are no keys: of weights, files, modules, waits, and of a scenario's own tables.
NO_KEYS = re.compile(
    r"model\.(embed_tokens|layers|norm|vocabulary)|buffer\.db|control\.(agreement|routing)|cluster\.key$|run\.path"
    r"|rollout\.(failure|reward)|trainer\.publish|verifier\.score|environment\.(live_at_once|start_s|mcp_servers|docker)"
    r"|weights\.(size_bytes|snapshot_s|copy_s|hash_s|encode_s|delta_bytes|fetch_s|check_s)$"  # a step's section
)


def test_keys_that_messages_name_exist():
    """An error that names a key which is gone sends its reader in a circle."""
    keys: set[str] = set()
    for part in parts()[2:]:
        for section in re.findall(r"`\[([\w.]+)\]`", part.splitlines()[0]):
            keys |= {f"{section}.{row['key']}" for row in ROW.finditer(part)}
    prefixes = {key.rsplit(".", depth)[0] for key in keys for depth in range(1, key.count(".") + 1)}
    tables = tuple(
        f"{key}." for key in keys if key.endswith(("parameters", "settings", "arguments", "engine_arguments"))
    )
    sections = "|".join(sorted({key.partition(".")[0] for key in keys}))
    named = re.compile(rf"(?<![\w/.])(?:{sections})(?:\.[a-z_]+)+(?![\w(/])(?!\.\w)")
    gone = [
        f"{file.relative_to(PACKAGE)}:{node.lineno} {name}"
        for file, tree in trees().items()
        if file.name != "removed.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value
        for name in named.findall(node.value)
        if name not in keys | prefixes
        and not name.startswith(tables)
        and not NO_KEYS.match(name)
        and not re.search(r"\.(py|jsonl?|toml|log|md|db|html|old|safetensors|index)$", name)
    ]
    assert gone == []
