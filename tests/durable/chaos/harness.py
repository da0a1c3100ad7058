"""The harness of a chaos run: leaves a line in a shared log for all that it does, and asks the model once or twice.

`harness.py LOG CALLS THINK_S`. A line is `word rollout_id token seconds detail`: the fencing token names the attempt;
the seconds are those of the machine's one monotonic clock. `alive` lines say until when an attempt ran, however it was
ended.
"""

import http.client
import json
import os
import sys
import threading
import time
from urllib.parse import urlsplit

LOG, CALLS, THINK_S = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
ROLLOUT, TOKEN = os.environ["SESSION_ID"], os.environ["FENCING_TOKEN"]
ALIVE_S = 0.1
TRIES = 120
OVER = (401, 403, 404)
"""The session is closed: somebody else has the rollout, or it was cancelled."""

sink = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def say(word: str, detail: object = "-") -> None:
    os.write(sink, f"{word} {ROLLOUT} {TOKEN} {time.monotonic():.3f} {detail}\n".encode())


def keep_saying() -> None:
    while True:
        time.sleep(ALIVE_S)
        say("alive")


def ask(messages: list[dict[str, str]]) -> str:
    """As a client library does: the same call again while the proxy or the engine is away."""
    base = urlsplit(os.environ["OPENAI_BASE_URL"])
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    body = json.dumps({"model": "m", "messages": messages}).encode()
    for _ in range(TRIES):
        connection = http.client.HTTPConnection(base.hostname or "", base.port, timeout=60)
        try:
            connection.request("POST", base.path + "/chat/completions", body, headers)
            answer = connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException) as exc:
            say("again", type(exc).__name__)
        else:
            if answer.status == 200:
                return str(json.loads(data)["choices"][0]["message"]["content"])
            say("again", answer.status)
            if answer.status in OVER:
                sys.exit(f"the session is over: {answer.status}")
        finally:
            connection.close()
        time.sleep(0.25)
    sys.exit("nobody answers")


say("begin")
threading.Thread(target=keep_saying, daemon=True).start()
asked = [{"role": "user", "content": "[script: chaos] Say something."}]
for _ in range(CALLS):
    time.sleep(THINK_S)
    reply = ask(asked)
    say("answered", reply.replace(" ", "_"))
    asked += [{"role": "assistant", "content": reply}, {"role": "user", "content": "Go on."}]
say("end")
