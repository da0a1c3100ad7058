#!/usr/bin/env python3
"""An agent program in a few lines, as somebody outside of polarq may have one: asks the model, runs what it wants."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

if "--version" in sys.argv:
    print("pocket-agent 1.2.0")
    sys.exit()
options = dict(word.lstrip("-").partition("=")[::2] for word in sys.argv[1:])
config: dict[str, Any] = {"max_turns": 5, "session": os.devnull}
if "config" in options:
    config = json.loads(Path(options["config"]).read_text())
tool = {"name": "sh", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}
messages = [{"role": "user", "content": sys.stdin.read()}]
for _ in range(config["max_turns"]):
    body = {
        "model": options.get("model") or "m",
        "messages": messages,
        "tools": [{"type": "function", "function": tool}],
    }
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    try:
        reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    except urllib.error.HTTPError as exc:
        # As some programs do: nothing but a line of text says that it did not work, and the exit code is 0.
        print(f"The model could not be asked: {exc}")
        break
    messages.append({"role": "assistant", "content": reply["content"], "tool_calls": reply.get("tool_calls") or []})
    Path(config["session"]).write_text(json.dumps(messages))
    if not reply.get("tool_calls"):
        break
    for call in reply["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
else:
    sys.exit(3)
