"""Pictures in traces: by reference, in their places, and a part of what makes two contexts the same."""

from __future__ import annotations

import pytest

from polarq.contracts import BranchCause, Completion, Trajectory
from polarq.trajectory.images import alike_until, images_of, picture_bytes, placed
from polarq.trajectory.per_request import PerRequestBuilder
from polarq.trajectory.prefix_merging import PrefixMergingBuilder
from tests.trajectory.calls import call
from tests.trajectory.pictures import PAD, image, shown


def build(*calls: Completion, emit: str = "paths") -> Trajectory:
    return PrefixMergingBuilder({"emit": emit}).build(calls)


def test_pictures_of_messages_are_named_by_their_bytes_and_told_without_them() -> None:
    messages = [shown(b"a", b"b"), {"role": "user", "content": "no picture"}, shown(b"a")]
    assert images_of(messages) == [image(b"a"), image(b"b"), image(b"a")]
    elsewhere = {"role": "user", "content": [{"type": "image_url", "image_url": "https://x.test/a.png"}]}
    assert [(one.media_type, one.size) for one in images_of([elsewhere])] == [("", len("https://x.test/a.png"))]
    broken = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,@"}}]}
    assert images_of([broken])[0].media_type == ""


def test_each_run_of_the_repeated_id_is_one_pictures_place() -> None:
    images = [image(b"a"), image(b"b")]
    ids = [1, PAD, PAD, 2, PAD, 3]
    assert placed(images, ids, PAD) == [image(b"a", 1, 3), image(b"b", 4, 5)]


@pytest.mark.parametrize("ids", [[1, PAD, PAD, 2], [PAD, 1, PAD, 1, PAD], [1, 2]])
def test_where_there_are_not_as_many_runs_as_pictures_no_place_is_told(ids: list[int]) -> None:
    images = [image(b"a"), image(b"b")]
    assert placed(images, ids, PAD) == images


def test_a_session_with_pictures_is_one_trace_that_says_where_they_are() -> None:
    a, b = image(b"a", 1, 3), image(b"b", 6, 7)
    first, after = [1, PAD, PAD, 2], [1, PAD, PAD, 2, 5, 3, PAD, 4]
    calls = [
        call(0, first, [5], images=[a], messages=[shown(b"a")], reply={"role": "assistant", "content": "x"}),
        call(1, after, [6], images=[a, b], messages=[shown(b"a"), {"role": "assistant", "content": "x"}, shown(b"b")]),
    ]
    trajectory = build(*calls)
    (trace,) = trajectory.traces
    whole = [*trace.prompt_ids, *trace.response_ids]
    assert trace.images == [a, b]
    assert [whole[one.start : one.end] for one in trace.images] == [[PAD, PAD], [PAD]]
    assert (trajectory.fidelity.images, trajectory.fidelity.unplaced_images) == (2, 0)
    assert picture_bytes(trace) == {a.sha256: b"a", b.sha256: b"b"}
    single = PerRequestBuilder({}).build(calls)
    assert [one.images for one in single.traces] == [[a], [a, b]]


def test_a_place_that_an_earlier_prompt_told_stays_told() -> None:
    unsure = [image(b"a"), image(b"b")]
    calls = [call(0, [1, PAD], [5], images=[image(b"a", 1, 2)]), call(1, [1, PAD, 5, 3], [6], images=unsure)]
    trajectory = build(*calls)
    assert [trace.images for trace in trajectory.traces] == [[image(b"a", 1, 2), image(b"b")]]
    assert (trajectory.fidelity.images, trajectory.fidelity.unplaced_images) == (2, 1)


def test_the_same_ids_for_another_picture_are_another_context() -> None:
    """Pictures of one size have the same ids: a screenshot that was taken anew does not go on from the one before."""
    said = [shown(b"a"), {"role": "assistant", "content": "x"}, {"role": "user", "content": "more"}]
    calls = [
        call(0, [1, PAD, 2], [5], images=[image(b"a", 1, 2)], messages=said[:1]),
        call(1, [1, PAD, 2, 5, 3], [6], images=[image(b"b", 1, 2)], messages=said),
        call(2, [1, PAD, 2, 5, 3, 6, 4], [8], images=[image(b"b", 1, 2)], messages=said),
    ]
    trajectory = build(*calls)
    assert [trace.completion_seqs for trace in trajectory.traces] == [[0], [1, 2]]
    assert [(one.parent, one.shared, one.cause) for one in trajectory.traces[1:]] == [(0, 1, BranchCause.DRIFT)]
    first = trajectory.fidelity.breaks[0]
    assert (first.seq, first.position, first.cause) == (1, 1, "another picture")
    tree = build(*calls, emit="tree").traces
    assert tree[1].prompt_ids == [PAD, 2, 5, 3]
    assert tree[1].images == [image(b"b", 1, 2)], "places are those in the full sequence"


def test_a_call_goes_on_from_the_one_of_two_alike_that_had_its_picture() -> None:
    a, b = [image(b"a", 1, 2)], [image(b"b", 1, 2)]
    calls = [
        call(0, [1, PAD], [5], images=a),
        call(1, [1, PAD], [5], images=b),
        call(2, [1, PAD, 5, 2], [6], images=a),
        call(3, [1, PAD, 5, 2], [6], images=b),
        call(4, [1, PAD, 5, 2], [6], images=a),
    ]
    trajectory = build(*calls)
    assert [trace.completion_seqs for trace in trajectory.traces] == [[0, 2], [1, 3], [4]]
    assert [trace.cause for trace in trajectory.traces[1:]] != [BranchCause.RETRY] * 2
    assert trajectory.traces[2].cause is BranchCause.RETRY


def test_a_picture_that_a_prompt_lost_is_another_context() -> None:
    trajectory = build(call(0, [1, 2], [5], images=[image(b"a")]), call(1, [1, 2, 5, 3], [6]))
    assert [trace.completion_seqs for trace in trajectory.traces] == [[0], [1]]


@pytest.mark.parametrize(
    ("mine", "theirs", "length"),
    [
        ([], [], 9),
        ([image(b"a", 2, 4)], [image(b"a", 2, 4), image(b"b", 9, 10)], 9),
        ([image(b"a", 2, 4)], [image(b"b", 2, 4)], 2),
        ([image(b"a", 2, 4), image(b"c", 6, 7)], [image(b"a", 2, 4), image(b"d", 6, 7)], 6),
        ([image(b"a", 12, 14)], [image(b"b", 12, 14)], 9),
        # No place is known: from the last one that is.
        ([image(b"a", 2, 4), image(b"c")], [image(b"a", 2, 4), image(b"d")], 4),
        ([image(b"a")], [image(b"b")], 0),
        ([image(b"a")], [image(b"a", 2, 4)], 9),
        # Ids that stand for a picture in one of them only.
        ([], [image(b"a", 2, 4)], 2),
    ],
)
def test_ids_in_common_mean_the_same_up_to_the_first_picture_that_differs(
    mine: list[object], theirs: list[object], length: int
) -> None:
    assert alike_until(mine, theirs, 9) == alike_until(theirs, mine, 9) == length  # type: ignore[arg-type]
