"""Runs a Harbor task's verifier in a sandbox, and reads the reward it writes.

The verifier writes to a path that is given, in a sandbox where processes that the agent left may serve it, and may as
well write there themselves. So that path leads to `/proc/self/fd/N`: a file without a name that the verifier's own
processes have open, and the agent's have not. What the agent's processes put in its place shows, and then the verifier
is run once more without them. (A process of the same user that goes into the verifier's own memory or descriptors is
not kept out by this; a `verifier_user` of its own does that.)
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from polarq.contracts.harbor import HarborConfig
from polarq.contracts.rollout import ExecKind
from polarq.contracts.sandbox import ExecCategory
from polarq.errors import EvaluatorFault, OutOfMemory, SandboxLost
from polarq_worker.evaluators.base import EvaluationTimedOut
from polarq_worker.evaluators.numbers import in_range, unambiguous
from polarq_worker.evaluators.snapshot_scripts import QUIET_SHELL
from polarq_worker.runtimes.base import ExecResult, Runtime

MAX_REWARD_BYTES = 256 * 1024
LOG = "eval/verifier"
_RUN = r"""
dir=$1 mark=$2 channel=$3 command=$4
new="$dir.$mark"
mkdir -p -- "$new" || exit 90
if [ "$channel" = descriptor ]; then
    hidden="$(mktemp)" && exec 9<>"$hidden" && rm -f -- "$hidden" || exit 90
    hidden="$(mktemp)" && exec 8<>"$hidden" && rm -f -- "$hidden" || exit 90
    chmod 666 /proc/self/fd/8 /proc/self/fd/9 || exit 90
    ln -s /proc/self/fd/9 "$new/reward.txt" && ln -s /proc/self/fd/8 "$new/reward.json" || exit 90
fi
# In one step: who writes into the old folder all the time would else be the first in the new one.
rm -rf -- "$dir"
mv -T -- "$new" "$dir" || { rm -rf -- "$dir" "$new"; exit 91; }
bash -o pipefail -c "$command"
status=$?
if [ "$channel" = descriptor ]; then
    state=own
    [ "$(readlink -- "$dir/reward.txt")" = /proc/self/fd/9 ] || state=replaced
    [ "$(readlink -- "$dir/reward.json")" = /proc/self/fd/8 ] || state=replaced
    text="$(head -c "$5" /proc/self/fd/9 | base64 -w 0)" json="$(head -c "$5" /proc/self/fd/8 | base64 -w 0)"
    printf '\n%s %s %s. %s. %s\n' "$mark" "$state" "$text" "$json" "$status"
else
    printf '\n%s file . . %s\n' "$mark" "$status"
fi
"""
_READ = """
for name in reward.txt reward.json; do
    if [ -f "$1/$name" ] && [ ! -L "$1/$name" ]; then
        head -c "$2" -- "$1/$name" | base64 -w 0
    elif [ -e "$1/$name" ] || [ -L "$1/$name" ]; then
        echo "$name" >&2
        exit 92
    fi
    echo .
done
"""
NOT_READY, TAKEN, NO_REGULAR_FILE = 90, 91, 92
"""The reward's folder cannot be made; somebody else is at its place; a reward is a pipe, a folder, a link."""


@dataclass(frozen=True)
class Verified:
    """What the verifier wrote."""

    text: bytes
    json: bytes
    status: int
    report: dict[str, Any]
    out_of_memory: bool = False
    """Something in the sandbox was killed for want of memory meanwhile."""


async def verify(
    runtime: Runtime, config: HarborConfig, env: Mapping[str, str], *, user: str | None, timeout_s: float
) -> Verified:
    """Raises `EvaluatorFault`, `RuntimeFault`. What the agent left running is killed when it is done."""
    first = await _once(runtime, config, env, user, timeout_s, config.reward_channel, LOG)
    state, found = first
    if state == "own" and (found.text.strip() or found.json.strip()):
        await runtime.end_background()
        return found
    if state == "file":
        await runtime.end_background()
        return await _read(runtime, config, found)
    # Nothing came: a program on the way closed what it had inherited, or somebody put files in the place of ours.
    again = "replaced" if state == "replaced" else "not inherited"
    if state == "replaced":
        await runtime.end_background()
    _, found = await _once(runtime, config, env, user, timeout_s, "file", f"{LOG}.again")
    await runtime.end_background()
    found = await _read(runtime, config, found)
    return replace(found, report={**found.report, "verified_again": again})


async def _once(
    runtime: Runtime,
    config: HarborConfig,
    env: Mapping[str, str],
    user: str | None,
    timeout_s: float,
    channel: str,
    log: str,
) -> tuple[str, Verified]:
    mark = f"polarq-{secrets.token_hex(16)}"
    command = config.test_command or f"bash {config.tests_target}/test.sh"
    arguments = [config.verifier_dir, mark, channel, command, str(MAX_REWARD_BYTES + 1)]
    result = await runtime.exec(
        ["bash", "-c", _RUN, "bash", *arguments],
        env={**env, **QUIET_SHELL, "TEST_DIR": config.tests_target, "VERIFIER_DIR": config.verifier_dir},
        user=user,
        timeout_s=timeout_s,
        log=log,
        max_output_bytes=6 * MAX_REWARD_BYTES,  # half of it from the end, where both rewards are
        category=ExecCategory.VERIFIER,
    )
    _blame(result, log)
    if result.exit_code == TAKEN and channel == "descriptor":
        return "replaced", Verified(b"", b"", TAKEN, {})
    line = result.stdout.rpartition(mark.encode())[2].split()
    if len(line) != 4:
        raise EvaluatorFault(f"the verifier's end was not seen ({result.why}); see log {log}")
    state, text, data, status = (word.decode() for word in line)
    report = {"verifier_exit_code": int(status), "verifier_s": round(result.duration_s, 3), "log": log}
    found = Verified(
        base64.b64decode(text.rstrip(".")),
        base64.b64decode(data.rstrip(".")),
        int(status),
        {**report, "reward_channel": channel},
        result.out_of_memory,
    )
    return state, found


async def _read(runtime: Runtime, config: HarborConfig, found: Verified) -> Verified:
    result = await runtime.exec(
        ["bash", "-c", _READ, "bash", config.verifier_dir, str(MAX_REWARD_BYTES + 1)],
        env=QUIET_SHELL,
        timeout_s=60.0,
        max_output_bytes=4 * MAX_REWARD_BYTES,
        category=ExecCategory.VERIFIER,
    )
    _blame(result, LOG)
    if result.exit_code == NO_REGULAR_FILE:
        raise EvaluatorFault(f"{result.stderr_text.strip()} is no regular file; see log {found.report['log']}")
    text, data = (line.rstrip(".") for line in [*result.stdout_text.split("\n"), "", ""][:2])
    return replace(found, text=base64.b64decode(text), json=base64.b64decode(data))


def reward_in(found: Verified, config: HarborConfig) -> tuple[float, dict[str, Any]]:
    """(the reward, what reward.json held). Raises `EvaluatorFault` for what is none; nothing is clamped. Raises
    `OutOfMemory` for none, and for the least, where the sandbox had too little memory: it says nothing of the work."""
    starved = f"the sandbox ran out of memory while it was graded; see log {found.report.get('log')}"
    try:
        reward, whole = _reward_in(found, config)
    except EvaluatorFault:
        if found.out_of_memory:
            raise OutOfMemory(starved) from None
        raise
    if found.out_of_memory and reward <= config.min_reward:
        raise OutOfMemory(starved)
    return reward, whole


def _reward_in(found: Verified, config: HarborConfig) -> tuple[float, dict[str, Any]]:
    low, high = config.min_reward, config.max_reward
    for data in (found.text, found.json):
        if len(data) > MAX_REWARD_BYTES:
            raise EvaluatorFault(f"the verifier wrote more than {MAX_REWARD_BYTES} bytes of reward")
    text = found.text.decode("utf-8", "replace").strip()
    if text:
        try:
            number = float(text) if "_" not in text else None
        except ValueError:
            number = None
        return in_range(text if number is None else number, low, high, "reward.txt"), {}
    try:
        value = json.loads(found.json, object_pairs_hook=unambiguous)
    except (ValueError, RecursionError):
        raise EvaluatorFault(_nothing(found)) from None
    if not isinstance(value, dict):
        return in_range(value, low, high, "reward.json"), {}
    if "reward" in value:
        return in_range(value["reward"], low, high, "'reward' in reward.json"), value
    if not value:
        raise EvaluatorFault("reward.json has no entry")
    numbers = [in_range(one, low, high, f"'{key}' in reward.json") for key, one in value.items()]
    return sum(numbers) / len(numbers), value


def _nothing(found: Verified) -> str:
    what = (
        "reward.json is not JSON without repeated keys"
        if found.json.strip()
        else "the verifier wrote neither reward.txt nor reward.json"
    )
    return f"{what} (exit code {found.status}); see log {found.report.get('log')}"


def _blame(result: ExecResult, log: str) -> None:
    if result.kind is ExecKind.SANDBOX_LOST:
        raise SandboxLost(f"the verifier could not be run: {result.why}")
    if result.out_of_memory and not result.ok:
        raise OutOfMemory(f"the sandbox ran out of memory while it was graded ({result.why}); see log {log}")
    if result.kind is ExecKind.TIMED_OUT:
        raise EvaluationTimedOut(f"the verifier: {result.why}; see evaluator.config.verifier_timeout and log {log}")
    if result.exit_code == NOT_READY or result.kind is not ExecKind.EXITED:
        raise EvaluatorFault(f"the verifier could not be run: {result.why}; see log {log}")
