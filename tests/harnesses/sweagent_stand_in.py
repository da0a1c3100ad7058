"""Does what a recorded run of SWE-agent 1.1.0 did: the same command line, configuration keys, calls and files.

It takes the keys that 1.1.0 takes (and refuses others, as it does), asks over chat completions with the recorded tools,
runs their commands in the repository, and writes its trajectory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import yaml

KEYS = {
    "": "env agent problem_statement output_dir actions env_var_path",
    "env": "deployment repo post_startup_commands post_startup_command_timeout name",
    "env.deployment": "type",
    "env.repo": "repo_name base_commit type reset",
    "problem_statement": "path extra_fields type id",
    "agent": "name templates tools history_processors model max_requeries action_sampler type",
    "agent.model": (
        "name per_instance_cost_limit total_cost_limit per_instance_call_limit temperature top_p api_base api_version"
        " api_key stop completion_kwargs convert_system_to_user retry delay fallbacks choose_api_key_by_thread"
        " max_input_tokens max_output_tokens litellm_model_registry custom_tokenizer"
    ),
    "agent.model.retry": "retries min_wait max_wait",
    "agent.tools": (
        "filter bundles propagate_env_variables env_variables registry_variables submit_command parse_function"
        " enable_bash_tool format_error_template command_docs multi_line_command_endings submit_command_end_name"
        " reset_commands execution_timeout install_timeout total_execution_timeout max_consecutive_execution_timeouts"
    ),
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": name, "parameters": {"type": "object", "properties": properties}},
    }
    for name, properties in (("bash", {"command": {"type": "string"}}), ("submit", {}))
]


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    for key, value in other.items():
        known = one.get(key)
        one[key] = merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return one


def read(arguments: list[str]) -> dict[str, Any]:
    assert arguments[0] == "run", arguments
    config: dict[str, Any] = {}
    for argument in arguments[1:]:
        option, _, file = argument.partition("=")
        assert option == "--config", argument
        merged(config, yaml.safe_load(Path(file).read_text()))
    for place, keys in KEYS.items():
        section: Any = config
        for name in filter(None, place.split(".")):
            section = section[name]
        if unknown := set(section) - set(keys.split()):
            sys.exit(f"Extra inputs are not permitted: {place}.{', '.join(sorted(unknown))}")
    return config


def ask(model: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    provider, _, name = model["name"].partition("/")
    assert provider == "openai", provider
    body = {"model": name, "messages": messages, "temperature": 0.0, "top_p": 1.0, "tools": TOOLS}
    headers = {"authorization": f"Bearer {model['api_key']}", "content-type": "application/json"}
    request = urllib.request.Request(f"{model['api_base']}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
        return message


def main() -> None:
    config = read(sys.argv[1:])
    repository = f"/{config['env']['repo']['repo_name']}"
    for bundle in config["agent"]["tools"]["bundles"]:
        assert Path(bundle["path"]).is_dir(), bundle
    problem = config["problem_statement"]
    said = config["agent"]["templates"]["instance_template"].replace(
        "{{working_dir}}", problem["extra_fields"]["working_dir"]
    )
    said = said.replace("{{problem_statement}}", Path(problem["path"]).read_text())
    messages: list[dict[str, Any]] = [{"role": "user", "content": said}]
    calls = 0
    while True:
        message = ask(config["agent"]["model"], messages)
        calls += 1
        (call,) = message["tool_calls"]
        if call["function"]["name"] == "submit":
            break
        command = json.loads(call["function"]["arguments"])["command"]
        ran = subprocess.run(["bash", "-c", command], cwd=repository, capture_output=True, text=True, check=False)
        messages += [
            {"role": "assistant", "content": message["content"], "tool_calls": [call]},
            {"role": "tool", "content": ran.stdout, "tool_call_id": call["id"]},
        ]
    folder = Path(config["output_dir"]) / problem["id"]
    folder.mkdir(parents=True)
    info = {"exit_status": "submitted", "model_stats": {"api_calls": calls, "instance_cost": 0}}
    (folder / f"{problem['id']}.traj").write_text(json.dumps({"info": info, "history": messages, "trajectory": []}))


if __name__ == "__main__":
    main()
