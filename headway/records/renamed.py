"""Public names that changed before the first release, and the name that each has now."""

from __future__ import annotations

RENAMED = {
    "headway.api": {"Serving": "ServeSettings"},
    "Episode": {
        "say": "add_message",
        "turn_to": "set_active_agent",
        "hold": "pin_to_process",
        "tell": "add_tool_result",
        "hear": "receive",
        "kept": "saved_state",
    },
}  # module or class -> old name -> new name


def renamed(owner: str, name: str) -> str:
    """Return a sentence with the present name of ``owner``'s former ``name``; empty for a name that never existed."""
    new = RENAMED[owner].get(name)
    return f"{owner}.{name} is called {new} now (docs/renames.md)" if new else ""
