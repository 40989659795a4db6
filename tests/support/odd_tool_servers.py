"""Tool servers that keep to the protocol in odd ways, or not at all, as sources for ``python -c``."""

from __future__ import annotations

import sys
from typing import Any

STRICT = """
import json, sys, threading
def out(i, **said): print(json.dumps({"jsonrpc": "2.0", "id": i, **said}), flush=True)
for line in sys.stdin:
    told = json.loads(line)
    asked, i = told.get("params") or {}, told.get("id")
    if told["method"] == "initialize":
        out(i, result={"protocolVersion": asked["protocolVersion"], "capabilities": {"tools": {}},
                       "serverInfo": {"name": "strict", "version": "1"}})
    elif told["method"] == "tools/list":
        out(i, result={"tools": [{"name": "divide", "inputSchema": {"type": "object"}}]})
    elif told["method"] == "tools/call" and not asked["arguments"]["by"]:
        out(i, error={"code": asked["arguments"]["code"], "message": "division by zero"})
    elif told["method"] == "tools/call":
        result = {"content": [{"type": "text", "text": "done"}]}
        threading.Timer(1.0, out, (i,), {"result": result}).start()
    elif i is not None:
        out(i, error={"code": -32601, "message": "no"})
"""


ODD = """
import json, os, subprocess, sys, time
def out(line): sys.stdout.buffer.write(line.encode() if isinstance(line, str) else line); sys.stdout.buffer.flush()
def answer(i, result, **more): out(json.dumps({"jsonrpc": "2.0", "id": i, "result": result, **more}) + "\\n")
def text(t): return {"content": [{"type": "text", "text": t}]}
left = None
for line in sys.stdin:
    told = json.loads(line)
    asked, i = told.get("params") or {}, told.get("id")
    if told["method"] == "initialize":
        answer(i, {"protocolVersion": asked["protocolVersion"], "capabilities": {"tools": {}},
                   "serverInfo": {"name": "odd", "version": "1"}})
    elif told["method"] == "tools/list":
        endless = os.environ.get("ENDLESS")
        time.sleep(float(endless or 0))  # for each page
        more = {"nextCursor": str(int(asked.get("cursor") or 0) + 1)} if endless else {}
        name = "do" + (asked.get("cursor") or "") if endless else "do"
        answer(i, {"tools": [{"name": name, "inputSchema": {"type": "object"}}], **more})
    elif told["method"] == "tools/call":
        how, big = asked["arguments"]["how"], "x" * 300_000
        if how == "well": answer(i, text("well"))
        elif how == "result first": out(json.dumps({"result": text(big), "jsonrpc": "2.0", "id": i}) + "\\n")
        elif how == "id last": out(json.dumps({"jsonrpc": "2.0", "result": text(big), "id": i}) + "\\n")
        elif how == "id first": out(json.dumps({"id": i, "jsonrpc": "2.0", "result": text(big)}) + "\\n")
        elif how == "version last": out(json.dumps({"result": text(big), "id": i, "jsonrpc": "2.0"}) + "\\n")
        elif how == "notification":
            out(json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": big}}) + "\\n")
            out(json.dumps({"method": "x", "params": {"data": big}, "jsonrpc": "2.0", "id": i}) + "\\n")
            answer(i, text("after it"))
        elif how == "unknown type": answer(i, {"content": [{"type": "hologram", "data": "x"}]})
        elif how == "no content": answer(i, {"content": "plain"})
        elif how == "null text": answer(i, {"content": [{"type": "text", "text": None}]})
        elif how == "code": out(json.dumps({"jsonrpc": "2.0", "id": i, "error": {"code": asked["arguments"]["code"],
                                                                          "message": "the shop is shut"}}) + "\\n")
        elif how == "half": answer(i, text("a\\ud800b \\U0001f600"))
        elif how == "escaped": answer(i, text("a\\\\ud800b"))
        elif how == "bytes":
            line = json.dumps({"jsonrpc": "2.0", "id": i, "result": text("a@b")}) + "\\n"
            out(line.encode().replace(b"@", b"\\xff"))
        elif how == "no json": out('{"jsonrpc": "2.0", "id": %d, "result": {,}}\\n' % i)
        elif how == "child":
            left = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
            answer(i, text(str(left.pid)))
        elif how == "dies": os._exit(1)
    elif i is not None:
        out(json.dumps({"jsonrpc": "2.0", "id": i, "error": {"code": -32601, "message": "no"}}) + "\\n")
"""


def odd(**settings: Any) -> dict[str, Any]:
    """The settings of a server of `ODD`."""
    return {"name": "odd", "command": [sys.executable, "-c", ODD], "timeout_s": 10, **settings}
