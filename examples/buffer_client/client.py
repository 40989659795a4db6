"""A rollout worker for `headway serve-buffer`, standard library alone: python client.py http://HOST:PORT [KEY]"""

import json
import sys
import time
import urllib.error
import urllib.request
from http.client import HTTPException

BUFFER, KEY = sys.argv[1], (sys.argv[2] if len(sys.argv) > 2 else "none")
OUTAGE_S = 30  # a run that doesn't answer for so long is over


def post(url, body, key=KEY):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.loads(response.read())


def solve(lease):
    task = lease["task"]
    messages = task["messages"] or [{"role": "user", "content": task["prompt"]}]
    body = {"model": lease["model"], "messages": messages}
    text = post(lease["base_url"] + "/chat/completions", body, lease["api_key"])["choices"][0]["message"]["content"]
    return float(text.split("=")[-1].strip() == task.get("answer"))  # your reward


answered_s = time.monotonic()
while time.monotonic() - answered_s < OUTAGE_S:
    try:
        lease = post(BUFFER + "/buffer/lease", {"wait_s": 20})
        answered_s = time.monotonic()
        if lease:  # else nothing was to do
            named = {name: lease[name] for name in ("group", "member", "attempt")}
            post(BUFFER + "/buffer/finish", {**named, "reward": solve(lease)})
    except urllib.error.HTTPError as refused:  # the attempt is over: another one is offered
        print(refused.code, refused.read().decode(), file=sys.stderr)
    except (OSError, HTTPException):  # the run is away: it may be resumed
        time.sleep(0.5)
