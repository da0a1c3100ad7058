"""Which ids go to the engine for a call: a session's own, or the engine's rendering."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from polarq.contracts.completion import Completion, CompletionLabel
from polarq_proxy.call import ABORT, Choice, ModelCall
from polarq_proxy.exact.base import CannotContinue, Extension, Message, Missed, carries_ids, rendering_options
from polarq_proxy.exact.branches import Branch, Branches, Setting, grown, meant, packed
from polarq_proxy.exact.meaning import (
    START,
    call_ids_of,
    chained,
    message_digest,
    only_text,
    thinking_digest,
    tools_digest,
    tree_digest,
)
from polarq_proxy.exact.suffix import Suffixes

LINES = 4
"""Conversations of a session whose last request is kept, so that only what is new in the next one is read."""
ROOTS = 8
"""Turns of which the whole call is kept, so that the engine can be asked to render its prompt again."""

_ENDED = frozenset({"stop", "tool_calls", "function_call"})
_NOT_SAMPLED = frozenset({None, ABORT, "error"})


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """A call's messages as digests: `chain[i]` stands for the first i messages, `digests[i]` for the i-th alone."""

    messages: list[Message] = field(repr=False)
    digests: list[bytes] = field(repr=False)
    chain: list[bytes] = field(repr=False)
    text: bool
    """They hold nothing but text."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The prompt of one call. Without ids the engine renders the messages."""

    ids: list[int] | None = None
    """The whole prompt; starts with the ids of `parent`."""
    missed: Missed | None = None
    """Why an earlier turn is not continued; None with no ids: there is none to continue."""
    parent: Branch | None = None
    forged: int = 0
    """Control tokens that the new messages' own text brings into the prompt."""
    detail: str = ""
    """More about what was missed, for a log."""
    call: ModelCall | None = field(default=None, repr=False)
    history: History | None = field(default=None, repr=False)
    setting: Setting | None = field(default=None, repr=False)
    from_ids: bool = False
    """The prompt is sent, or was sent, as ids."""
    packed: bytes = field(default=b"", repr=False)
    """The same ids as native 32-bit integers."""


class ExactContext:
    """One per session. `prompt` before a call, `sampled` once for each of its choices after it was recorded."""

    def __init__(self, branches: Branches | None = None) -> None:
        self.branches = Branches() if branches is None else branches
        self._lines: list[History] = []
        self._roots: list[Branch] = []
        self._tools: tuple[list[Message] | None, bytes] = (None, START)

    async def prompt(self, call: ModelCall, suffixes: Suffixes) -> Plan:
        """Never raises for what it cannot continue: that is a plan without ids."""
        if call.prompt is not None:
            return Plan()
        history = self._read(call.messages)
        setting = self._setting(call, suffixes.name)
        try:
            return await self._continued(call, history, setting, suffixes)
        except CannotContinue as miss:
            return Plan(missed=miss.cause, detail=str(miss), call=call, history=history, setting=setting)

    def sampled(self, plan: Plan, prompt_ids: Sequence[int] | None, choice: Choice) -> None:
        """What came of a plan: the prompt that the engine says it conditioned on, and one answer. An answer that was
        aborted, or that has no ids, is not continued. Cheap when `prompt_ids` is the plan's own list."""
        call, history, setting = plan.call, plan.history, plan.setting
        if call is None or history is None or setting is None:
            return
        if not prompt_ids or not choice.ids or choice.finish_reason in _NOT_SAMPLED:
            return
        try:
            same = plan.ids is not None and (prompt_ids is plan.ids or prompt_ids == plan.ids)
            prompt, sampled = plan.packed if same else packed(prompt_ids), packed(choice.ids)
        except (TypeError, OverflowError):
            return  # recorded as untrainable: these are no token ids
        answer = message_digest(choice.message)
        parent, tail, tokens = grown(plan.parent, prompt, sampled)
        branch = Branch(
            parent=parent,
            tail=tail,
            tokens=tokens,
            sampled_tokens=len(choice.ids),
            end_id=_end_id(call, choice),
            history=chained(history.chain[-1], answer),
            setting=setting,
            thinking=thinking_digest(choice.message),
            call_ids=call_ids_of(choice.message),
            asked=None if plan.from_ids else call,
        )
        self.branches.add(branch, history.chain[1:], answer)
        if branch.asked is not None:
            self._roots.append(branch)
            for old in self._roots[:-ROOTS]:
                old.asked = None
            del self._roots[:-ROOTS]

    def remember(self, completions: Sequence[Completion], rendered_by: str) -> None:
        """What another process recorded of this session, in order. `rendered_by` is the name of the `Suffixes` that
        later calls come with."""
        for completion in completions:
            if completion.label is CompletionLabel.ABORTED:
                continue
            call = ModelCall(completion.messages, completion.tools, completion.sampling, completion.model_requested)
            history, setting = self._read(call.messages), self._setting(call, rendered_by)
            parent = None
            if completion.exact:
                with suppress(CannotContinue):
                    parent, _ = self._parent(history, setting)
            plan = Plan(parent=parent, call=call, history=history, setting=setting, from_ids=completion.exact)
            choice = Choice(0, completion.reply, completion.sampled_ids, None, completion.finish_reason)
            choice.stop_reason = completion.stop_reason
            self.sampled(plan, completion.prompt_ids, choice)

    def _setting(self, call: ModelCall, rendered_by: str) -> Setting:
        return Setting(self._digest_of(call.tools), tree_digest(rendering_options(call)), rendered_by)

    async def _continued(self, call: ModelCall, history: History, setting: Setting, suffixes: Suffixes) -> Plan:
        branch, covered = self._parent(history, setting)
        if branch is None:
            return Plan(call=call, history=history, setting=setting)
        if not carries_ids(call):
            raise CannotContinue(Missed.OPTIONS_DIFFER, "an option of the call shapes the prompt itself")
        if not history.text:
            raise CannotContinue(Missed.IMAGES)
        self.branches.touch(branch)
        root = branch.root
        await suffixes.prove_door(call, root.asked, root.ended)
        extension = Extension(branch.ended(), call.messages[covered - 1], call.messages[covered:], call)
        suffix = await suffixes.after(extension, branch.depth)
        whole = extension.ended.followed_by(suffix.ids)
        suffixes.check_room(call, len(whole))
        return Plan(
            ids=whole.tolist(),
            from_ids=True,
            parent=branch,
            forged=suffix.forged,
            call=call,
            history=history,
            setting=setting,
            packed=whole.tobytes(),
        )

    def _parent(self, history: History, setting: Setting) -> tuple[Branch | None, int]:
        """The sampled turn that a history goes on from, and how many messages end with it. Raises `CannotContinue`
        when there should be one."""
        messages, branches = history.messages, self.branches
        covered = branches.longest(history.chain)
        if not covered:
            known = branches.known(history.chain)
            later = [place for place in range(known, len(messages)) if messages[place].get("role") == "assistant"]
            if later and (known or any(branches.answered(history.digests[place]) for place in later)):
                raise CannotContinue(Missed.HISTORY_DIFFERS, f"from message {known} on")
            return None, 0
        if any(message.get("role") == "assistant" for message in messages[covered:]):
            raise CannotContinue(Missed.NOT_SAMPLED, f"after message {covered}")
        found = [b for b in branches.at(history.chain[covered]) if b.setting.rendered_by == setting.rendered_by]
        if not found:
            raise CannotContinue(Missed.OPTIONS_DIFFER, "sampled by another model")
        found = [branch for branch in found if branch.setting.tools == setting.tools]
        if not found:
            raise CannotContinue(Missed.TOOLS_DIFFER)
        found = [branch for branch in found if branch.setting.options == setting.options]
        if not found:
            raise CannotContinue(Missed.OPTIONS_DIFFER)
        return meant(found, messages[covered - 1]), covered

    def _read(self, messages: list[Message]) -> History:
        """Digests of all messages; only those are computed that no recent request had at the same place."""
        for line in reversed(self._lines):
            known = line.messages
            if messages[: len(known)] == known:
                self._lines.remove(line)  # it goes on
                history = _longer(line, messages)
                break
        else:
            like = max(self._lines, key=lambda line: _alike(line.messages, messages), default=_NOTHING)
            history = _compared(like, messages)
        self._lines.append(history)
        del self._lines[:-LINES]
        return history

    def _digest_of(self, tools: list[Message] | None) -> bytes:
        if tools != self._tools[0]:
            self._tools = tools, tools_digest(tools)
        return self._tools[1]


_NOTHING = History([], [], [START], True)


def _longer(line: History, messages: list[Message]) -> History:
    """The history of `messages`, which begin with those of `line`."""
    new = messages[len(line.messages) :]
    digests, chain = list(line.digests), list(line.chain)
    for message in new:
        digests.append(message_digest(message))
        chain.append(chained(chain[-1], digests[-1]))
    return History(messages, digests, chain, line.text and all(map(only_text, new)))


def _compared(line: History, messages: list[Message]) -> History:
    """The same for messages of which only some are spelt like those of `line`: cache marks move, for one."""
    digests: list[bytes] = []
    chain = [START]
    for place, message in enumerate(messages):
        known = place < len(line.messages) and line.messages[place] == message
        digests.append(line.digests[place] if known else message_digest(message))
        chain.append(chained(chain[-1], digests[-1]))
    return History(messages, digests, chain, all(map(only_text, messages)))


def _alike(old: Sequence[Message], new: Sequence[Message]) -> int:
    """How many messages at their beginning are the same, looked at roughly: for choosing a line."""
    count = 0
    for one, other in zip(old, new, strict=False):
        if one != other:
            break
        count += 1
    return count


def _end_id(call: ModelCall, choice: Choice) -> int | None:
    """The control token that ended a turn. A stop that the request itself asked for ends nothing in the template."""
    ids = choice.ids
    if not ids or choice.finish_reason not in _ENDED:
        return None
    last = int(ids[-1])
    stops = call.options.get("stop_token_ids")
    if isinstance(stops, list) and last in stops:
        return None
    return last if choice.stop_reason is None or choice.stop_reason == last else None
