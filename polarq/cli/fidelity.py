"""A trajectory's fidelity record, as lines for a person: what was kept, and where and why not."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from polarq.cli.terminal import shown
from polarq.contracts.trajectory import Trajectory

_SHOWN = 20
_COUNTS = {
    "missing_logprobs": "missing log-probabilities",
    "forged_control_tokens": "forged control tokens",
    "replays": "replays",
    "side_calls": "side calls",
    "incomplete_calls": "incomplete calls",
    "empty_calls": "empty calls",
    "images": "pictures",
    "unplaced_images": "pictures without a place (the topology's image_token_id tells it)",
}


def fidelity_lines(trajectory: Trajectory) -> Iterator[Text]:
    """Indented as a part of its rollout. What is 0 is not told."""
    found = trajectory.fidelity
    share = found.trainable_fraction
    kept = f" ({share:.1%} of those of its steps)" if share is not None and share < 1 else ""
    yield Text(
        f"  trajectory by {shown(trajectory.builder)}: {found.calls} calls, {found.traces} traces, "
        f"{found.sampled_tokens} sampled tokens, {found.trainable_tokens} trainable{kept}"
    )
    counts = [
        f"{count} {_COUNTS[name]}"
        for name, count in found.counts().model_dump(exclude_defaults=True).items()
        if name in _COUNTS
    ]
    if counts:
        yield Text(f"    {', '.join(counts)}")
    for one in found.breaks[:_SHOWN]:
        after = "" if one.continues is None else f" of call {one.continues}"
        yield Text(
            f"    break: call {one.seq} leaves the ids{after} at position {one.position:,}: {shown(one.cause)}",
            "yellow",
        )
    for seq, reason in list(found.untrainable.items())[:_SHOWN]:
        yield Text(f"    call {shown(seq)} is not trainable: {shown(reason)}")
    more = max(0, len(found.breaks) - _SHOWN) + max(0, len(found.untrainable) - _SHOWN)
    if more:
        yield Text(f"    and {more} more (--json has all)")
