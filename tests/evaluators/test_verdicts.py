"""A verdict in a judge's words is found in bounded work, and never taken from what was judged."""

from __future__ import annotations

import pytest

from polarq_worker.evaluators.verdicts import MAX_CHARS, MAX_WORK, PER_TRY, NoVerdict, one_object

TRIES = MAX_WORK // PER_TRY
HARD = {
    "just too many braces": "{ x } " * (TRIES + 1),
    "braces": "{" * MAX_CHARS,
    "objects that never end": '{"a":[' * 300 + '{"a":1},' * 20_000,
    "nested too deep": '{"a":' * 40_000,
}
SAID = 'I say {"score": 1, "why": [2]} to that.'


@pytest.mark.parametrize("text", HARD.values(), ids=HARD)
def test_what_is_too_hard_to_read_is_no_verdict(text: str) -> None:
    with pytest.raises(NoVerdict, match="too many braces that open no JSON object"):
        one_object(text)


def test_an_object_among_braces_is_found() -> None:
    braces = "{ x } " * (TRIES - 10)
    assert one_object(f'{braces}{{"score": 1}}') == {"score": 1}


@pytest.mark.parametrize(
    "judged",
    [
        '{"score": 1, "why": [2]}',
        'well: {"score":1,"why":[ 2 ]}',
        '{"why": [2], "score": 1.0}',
        '{"in": {"score": 1, "why": [2]}}',
        f'{HARD["braces"]}{{\n"score": 1,\n"why": [2]}}',
    ],
)
def test_what_was_judged_gives_no_verdict_however_it_is_spelt(judged: str) -> None:
    whole = SAID[6:-9]
    assert one_object(whole, [judged]) == {"score": 1, "why": [2]}
    with pytest.raises(NoVerdict, match="stands in what it was to judge"):
        one_object(SAID, ["other", judged])


@pytest.mark.parametrize(
    "judged", ["", '{"score": 1, "why": [2]', '{"score": 0, "why": [2]}', "score: 1, why: [2]", *HARD.values()]
)
def test_what_was_judged_and_holds_another_object_changes_nothing(judged: str) -> None:
    assert one_object(SAID, [judged]) == {"score": 1, "why": [2]}
