"""Bytes in the store: exact, small, and never silently damaged."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarq.contracts.completion import VersionSpan
from polarq.contracts.trajectory import Break, Fidelity, Trace, Trajectory
from polarq.errors import PayloadCorrupt
from polarq.store.codec import decode_trajectory, encode_trajectory, pack, unpack

SCALARS = st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False) | st.text()
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30)


def f32(value: float) -> float:
    result: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return result


@given(TREES)
def test_any_tree_comes_back_as_it_was(tree: Any) -> None:
    assert unpack(pack({"content": tree})) == {"content": tree}


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_token_ids_come_back_exactly(ids: list[int]) -> None:
    assert unpack(pack({"sampled_ids": ids, "loss_mask": [1] * len(ids)})) == {
        "sampled_ids": ids,
        "loss_mask": [1] * len(ids),
    }


@given(st.lists(st.none() | st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_log_probabilities_of_an_engine_come_back_exactly_and_gaps_stay_gaps(values: list[float | None]) -> None:
    assert unpack(pack({"logprobs": values})) == {"logprobs": values}


@pytest.mark.parametrize(
    "tree",
    [
        {"file_ids": ["a", "b"]},
        {"flag_ids": [True, False]},
        {"big_ids": [2**31, 1]},
        {"mixed_ids": [1, "a", None]},
        {"nested_ids": [[1], {"inner_ids": [1, 2]}]},
        {"logprobs": {"content": [{"token": "a", "logprob": -0.1}]}},
        {"logprobs": ["a", 1.5]},
        {"ids": [1, 2], "prompt_ids": []},
    ],
)
def test_foreign_values_under_our_names_are_left_alone(tree: dict[str, Any]) -> None:
    back = unpack(pack(tree))
    assert back == tree
    assert str(back) == str(tree)  # True is not 1


def test_a_long_call_takes_little_room() -> None:
    generator = random.Random(1)
    ids = [int(generator.paretovariate(1.0)) % 150_000 for _ in range(32_000)]
    assert len(pack({"prompt_ids": ids, "logprobs": [-0.25] * 500})) < 64_000


@pytest.mark.parametrize("position", [0, 2, 3, 8, -1])
def test_a_changed_byte_is_noticed(position: int) -> None:
    data = bytearray(pack({"sampled_ids": list(range(100))}))
    data[position] ^= 0x41
    with pytest.raises(PayloadCorrupt):
        unpack(bytes(data))


@pytest.mark.parametrize("length", [0, 6, 7, 20])
def test_a_cut_payload_is_noticed(length: int) -> None:
    with pytest.raises(PayloadCorrupt):
        unpack(pack({"a": "b" * 100})[:length])


def test_a_newer_version_asks_for_an_upgrade() -> None:
    data = bytearray(pack({}))
    data[2] = 9
    with pytest.raises(PayloadCorrupt, match="upgrade"):
        unpack(bytes(data))


def test_a_trajectory_comes_back_whole() -> None:
    trajectory = Trajectory(
        builder="per_request",
        traces=[
            Trace(
                index=0,
                prompt_ids=[1, 2, 3],
                response_ids=[4, 5],
                loss_mask=[1, 0],
                logprobs=[f32(-0.1), 0.0],
                teacher_logprobs=[f32(-0.3), 0.0],
                weight_versions=[VersionSpan(version="7", start=0, end=2)],
                prompt_messages=[{"role": "user", "content": "go 🧪 ह"}],
                reward=0.5,
                completion_seqs=[0],
            )
        ],
        fidelity=Fidelity(calls=1, traces=1, breaks=[Break(seq=1, position=2, cause="template")]),
        metadata={"note": [1, None, 2.5]},
    )
    assert decode_trajectory(encode_trajectory(trajectory)) == trajectory


def test_what_is_not_a_trajectory_is_refused() -> None:
    with pytest.raises(PayloadCorrupt, match="trajectory"):
        decode_trajectory(pack({"builder": 3}))
