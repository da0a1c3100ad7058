"""What a prompt shares with earlier ones, found in its text, is what the ids themselves share."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarq.store.prefixes import MAX_BRANCHES, NO_HISTORY, Prefixes, Prompt
from polarq.store.token_text import Border, Line, NotIds, ids_of, text_of

# Ids whose texts begin with each other, so that a border missed by a digit shows.
IDS = st.lists(st.sampled_from([1, 12, 123, 1234, 2, 23, 0, 2**31 - 1]), max_size=12)
TURNS = st.lists(st.tuples(IDS, IDS), max_size=14)


def read(prefixes: Prefixes, text: bytes) -> Prompt:
    padded = b"[[" + text + b",7]"  # what stands around a prompt in an answer is not part of it
    return prefixes.read(padded, 2, 2 + len(text))


def shared(first: list[int], second: list[int]) -> int:
    return next(
        (at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other),
        min(len(first), len(second)),
    )


@settings(max_examples=300)
@given(TURNS, st.booleans())
def test_shared_ids_and_parents_are_those_of_the_ids(turns: list[tuple[list[int], list[int]]], extend: bool) -> None:
    prefixes = Prefixes()
    stored: list[tuple[list[int], list[int]]] = []
    for seq, (new, sampled) in enumerate(turns):
        prompt = [*stored[-1][0], *stored[-1][1], *new] if extend and stored else new
        found = read(prefixes, text_of(prompt))
        contexts = [[*before, *after] for before, after in stored]
        assert found.line.text == text_of(prompt)
        assert found.count == len(prompt)
        assert found.new_ids.tolist() == prompt[found.shared.length :]
        if len(stored) <= MAX_BRANCHES:
            assert found.shared.length == max((shared(context, prompt) for context in contexts), default=0)
        if found.shared.base is not None:
            assert contexts[int(found.shared.base)][: found.shared.length] == prompt[: found.shared.length]
        parents = [
            (len(context), place)
            for place, context in enumerate(contexts)
            if stored[place][1] and prompt[: len(context)] == context
        ]
        if len(stored) <= MAX_BRANCHES:
            assert found.parent == (max(parents)[1] if parents else None)
        prefixes.add(str(seq), seq, found, sampled, NO_HISTORY)
        stored.append((prompt, sampled))


@given(IDS, IDS, IDS, st.integers(0, 60))
def test_a_line_in_parts_is_compared_as_one_text(
    first: list[int], second: list[int], data: list[int], cut: int
) -> None:
    line = Line().plus(text_of(first), len(first)).plus(text_of(second), len(second))
    assert line.text == text_of([*first, *second])
    text = text_of([*first, *second, *data])[:cut]
    border = line.common(text, 0, len(text))
    known = line.before(border)
    assert known.length == border.length == len(known.text)
    assert text.startswith(known.text)
    assert ids_of(known.text) == [*first, *second][: known.count]
    whole = text.split(b",") if text else []
    expected = shared([*map(int, filter(None, whole))], [*first, *second])
    assert known.count == expected


@given(TURNS)
def test_calls_written_at_the_same_time_know_nothing_of_each_other(turns: list[tuple[list[int], list[int]]]) -> None:
    prefixes = Prefixes()
    prompts = [read(prefixes, text_of(prompt)) for prompt, _ in turns]
    for seq, (prompt, (_, sampled)) in enumerate(zip(prompts, turns, strict=True)):
        prefixes.add(str(seq), seq, prompt, sampled, NO_HISTORY)
    for prompt_ids, sampled in turns[-1:]:
        after = read(prefixes, text_of([*prompt_ids, *sampled, 5]))
        assert after.shared.length >= len(prompt_ids) + len(sampled)


@pytest.mark.parametrize(
    "text", [b"1,", b",1", b"1,,2", b"x", b"1.5", b"-1", b"2147483648", b'"1"', b"null", b"01", b"[1]"]
)
@pytest.mark.parametrize("known", [[], [1]])
def test_what_are_no_ids_is_refused(text: bytes, known: list[int]) -> None:
    prefixes = Prefixes()
    prefixes.add("a", 0, read(prefixes, text_of(known)), [], NO_HISTORY)
    with pytest.raises(NotIds):
        read(prefixes, text)


@pytest.mark.parametrize("text", [b"1, 12,  123", b" 1,12,123 ", b"1,12,123", b"1,-0,123"])
def test_another_spelling_of_the_same_ids_is_the_same(text: bytes) -> None:
    prefixes = Prefixes()
    prefixes.add("a", 0, read(prefixes, b"1,12"), [123], NO_HISTORY)
    found = read(prefixes, text)
    assert found.canonical == (text == b"1,12,123")
    assert found.line.text == text.replace(b" ", b"").replace(b"-0", b"0")
    assert found.parent == (None if b"-" in text else 0)


def test_a_long_session_is_held_in_few_parts() -> None:
    prefixes = Prefixes()
    ids: list[int] = []
    for seq in range(400):
        ids += [seq, seq + 1]
        prefixes.add(str(seq), seq, read(prefixes, text_of(ids)), [7], NO_HISTORY)
        ids.append(7)
    [branch] = prefixes._branches
    assert len(branch.line.parts) < 12
    assert branch.line.count == len(ids)
    assert [seq for _, seq in branch.marks] == list(range(400))


@given(
    st.lists(st.sampled_from([{"n": 1}, {"n": True}, {"n": 1.0}, {"n": "1"}, {"n": None}, {"n": 2**70}]), max_size=6),
    st.data(),
)
def test_messages_are_told_apart_by_their_json(messages: list[dict[str, Any]], data: st.DataObject) -> None:
    other = data.draw(st.permutations(messages))
    history = NO_HISTORY.with_new(0, messages)
    length = history.common(other)
    assert repr(other[:length]) == repr(messages[:length])
    assert length == len(messages) or repr(other[length]) != repr(messages[length])


def test_the_border_of_nothing_is_the_start() -> None:
    assert Line().common(b"1,2", 0, 3) == Border(0, 0, 0)
