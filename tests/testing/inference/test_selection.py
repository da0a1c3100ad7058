"""Which script and turn a request gets."""

from __future__ import annotations

from typing import Any

from polarq.testing.inference import Scenario, Script, Turn
from polarq.testing.inference.faults import HttpStatus
from tests.testing.inference.asking import HELLO, Client, Messages
from tests.testing.inference.conftest import Serve

THREE = Scenario(
    name="three",
    scripts=tuple(
        Script(name=name, turns=(Turn(content=f"{name} 1"), Turn(content=f"{name} 2"))) for name in ("a", "b", "c")
    ),
)


async def said(client: Client, messages: Messages | None = None, **how: Any) -> str:
    answer = await client.chat(messages, **how)
    return str(answer["choices"][0]["message"]["content"])


def user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


async def test_the_turn_is_the_number_of_assistant_messages(serve: Serve) -> None:
    client = await serve(THREE)

    for answered, wanted in enumerate(("a 1", "a 2", "a 2")):
        messages = [*HELLO, *[{"role": "assistant", "content": "x"}] * answered]
        assert await said(client, messages) == wanted


async def test_new_conversations_take_the_scripts_in_turn_and_keep_them(serve: Serve) -> None:
    client = await serve(THREE)

    assert [await said(client, user(f"task {n}")) for n in (1, 2, 1, 3, 4, 2)] == [
        "a 1",
        "b 1",
        "a 1",
        "c 1",
        "a 1",
        "b 1",
    ]


async def test_a_conversation_that_grows_keeps_its_script(serve: Serve) -> None:
    client = await serve(THREE)
    await said(client, user("another"))
    await said(client, HELLO)

    longer = [*HELLO, {"role": "assistant", "content": "b 1"}, {"role": "user", "content": "go on"}]

    assert await said(client, longer) == "b 2"


async def test_the_session_header_tells_identical_prompts_apart(serve: Serve) -> None:
    client = await serve(THREE)

    answers = [await said(client, headers={"X-Session-ID": name}) for name in ("red", "green", "red", "blue")]

    assert answers == ["a 1", "b 1", "a 1", "c 1"]


async def test_a_rollout_id_takes_the_script_of_its_index_whatever_the_order(serve: Serve) -> None:
    client = await serve(THREE)

    answers = [await said(client, headers={"X-Session-ID": f"task-1.{index}"}) for index in (2, 0, 4, 1)]

    assert answers == ["c 1", "a 1", "b 1", "b 1"]


async def test_a_session_may_stand_in_the_other_header_or_in_the_body(serve: Serve) -> None:
    client = await serve(THREE)

    assert await said(client, headers={"X-Polarq-Rollout": "t.1"}) == "b 1"
    assert await said(client, session_id="t.2") == "c 1"


async def test_a_marker_in_the_messages_names_the_script_and_beats_the_session(serve: Serve) -> None:
    client = await serve(THREE)
    marked = [{"role": "user", "content": [{"type": "text", "text": "do it [script: c] please"}]}]

    assert await said(client, marked, headers={"X-Session-ID": "t.0"}) == "c 1"


async def test_a_marker_that_the_model_wrote_does_not_count(serve: Serve) -> None:
    client = await serve(THREE)

    assert await said(client, [*HELLO, {"role": "assistant", "content": "[script: c]"}]) == "a 2"


async def test_the_models_suffix_beats_everything(serve: Serve) -> None:
    client = await serve(THREE)

    assert await said(client, user("[script: c]"), model="tiny:b", headers={"X-Session-ID": "t.0"}) == "b 1"


async def test_an_unknown_script_is_a_400_that_lists_the_known_ones(serve: Serve) -> None:
    client = await serve(THREE)

    answer = await client.post("/v1/chat/completions", {"model": "tiny:nope", "messages": HELLO})

    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "scenario 'three' has no script 'nope'; it has a, b, c"


async def test_choice_i_takes_the_script_i_places_further_on(serve: Serve) -> None:
    client = await serve(THREE)

    answer = await client.chat(model="tiny:b", n=3)

    assert [choice["message"]["content"] for choice in answer["choices"]] == ["b 1", "c 1", "a 1"]


async def test_a_completion_counts_the_assistant_turns_in_its_ids(serve: Serve) -> None:
    client = await serve(THREE)
    asked = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    again = f"{asked}a 1<|im_end|>\n{asked}"

    answers = [await client.post("/v1/completions", {"model": "tiny:a", "prompt": prompt}) for prompt in (asked, again)]

    assert [answer.json()["choices"][0]["text"] for answer in answers] == ["a 1", "a 2"]


async def test_the_ledger_names_session_script_and_turn(serve: Serve) -> None:
    client = await serve(THREE)

    await client.chat(headers={"X-Session-ID": "task-9.1", "X-Request-Id": "r1"})

    call = client.ledger[0]
    assert (call.request_id, call.session_id, call.script, call.turn_index) == ("chatcmpl-r1", "task-9.1", "b", 0)


async def test_a_fault_with_times_is_counted_per_conversation_and_turn(serve: Serve) -> None:
    flaky = Script(
        name="flaky", turns=(Turn(content="1", fault=HttpStatus(kind="http_status", times=1)), Turn(content="2"))
    )
    client = await serve(Scenario(name="flaky", scripts=(flaky,)))

    async def status(session_id: str) -> int:
        body = {"model": "tiny", "messages": HELLO, "session_id": session_id}
        return (await client.post("/v1/chat/completions", body)).status_code

    assert [await status(name) for name in ("t.0", "t.0", "t.1", "t.1", "t.0")] == [503, 200, 503, 200, 200]
