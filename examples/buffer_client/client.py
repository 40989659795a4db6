"""A rollout worker for `headway serve-buffer`, standard library alone: python client.py http://HOST:PORT [KEY]"""

import json
import sys
import time
import urllib.error
import urllib.request
from http.client import HTTPException

BUFFER, KEY = sys.argv[1], (sys.argv[2] if len(sys.argv) > 2 else "none")


def post(url, body, key=KEY):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    for _ in range(60):  # half a second apart, until it is answered: the run may be away, to be resumed
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                return json.loads(response.read())
        except (OSError, HTTPException) as error:
            if getattr(error, "code", 503) != 503:
                raise
            time.sleep(0.5)
    sys.exit("the run doesn't answer any more")


def solve(lease):
    task = lease["task"]
    body = {"model": lease["model"], "messages": task["messages"] or [{"role": "user", "content": task["prompt"]}]}
    text = post(lease["base_url"] + "/chat/completions", body, lease["api_key"])["choices"][0]["message"]["content"]
    return float(text.split("=")[-1].strip() == task.get("answer"))  # your reward


while True:
    if lease := post(BUFFER + "/buffer/lease", {"wait_s": 20}):  # else nothing was to do
        try:
            named = {name: lease[name] for name in ("group", "member", "attempt")}
            post(BUFFER + "/buffer/finish", {**named, "reward": solve(lease)})
        except urllib.error.HTTPError as refused:  # the attempt is over: another one is offered
            print(refused.code, refused.read().decode(), file=sys.stderr)
