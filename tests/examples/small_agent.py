"""The smallest agent with a shell: asks the model, runs what it calls `bash` with, and ends when that says so.

In place of a real program where an example is about something else, and starting one takes seconds.
"""

import json
import os
import subprocess
import urllib.request
from pathlib import Path

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}


def main() -> None:
    messages = [{"role": "user", "content": Path(os.environ["POLARQ_INSTRUCTION_FILE"]).read_text("utf-8")}]
    headers = {"content-type": "application/json", "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    while True:
        body = json.dumps({"model": "any", "messages": messages, "tools": [TOOL]}).encode()
        request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
        with urllib.request.urlopen(request) as answer:
            said = json.load(answer)["choices"][0]["message"]
        messages.append({key: said[key] for key in ("role", "content", "tool_calls")})
        for call in said["tool_calls"]:
            command = json.loads(call["function"]["arguments"])["command"]
            if "COMPLETE_TASK" in command:
                return
            ran = subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": ran.stdout.decode()})


main()
