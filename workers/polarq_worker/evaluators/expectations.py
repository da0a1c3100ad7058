"""Compares the tests that were expected with those that were seen.

A full id (`path::name`, with closed brackets) is matched exactly, in pytest's notation or the dotted one. Ids of old
data sets are shorter, and are matched by these rules only; the report says so for each:

- cut at a blank (`t/test_x.py::test_p[2`): every seen id that begins with it counts ("prefix");
- without a path (`TestX.test_y`, `test_y`): every seen id counts that has this behind its path ("name"), cut at a blank
  likewise ("name prefix"); failing that, with or without parameters ("name without parameters"), and at last every id
  that ends with it after a dot ("suffix").

Where several ids count, all must have the expected status.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from polarq.contracts.evaluators import TestStatus
from polarq_worker.evaluators.statuses import Statuses, dotted

EXACT = "exact"


@dataclass(slots=True)
class Comparison:
    """How the expectation fared."""

    as_expected: list[str] = field(default_factory=list)
    otherwise: dict[str, str] = field(default_factory=dict)
    """Expected id -> the status it had instead."""
    missing: list[str] = field(default_factory=list)
    matched_by: dict[str, str] = field(default_factory=dict)
    """Expected id -> the rule, for those that were not matched exactly."""

    @property
    def passed(self) -> bool:
        return bool(self.as_expected) and not self.otherwise and not self.missing


def compare(expected: Mapping[str, TestStatus], seen: Statuses) -> Comparison:
    index = _Index(seen)
    result = Comparison()
    for test_id, status in expected.items():
        rule, found = index.find(test_id)
        statuses = {seen[seen_id] for seen_id in found}
        if not found:
            result.missing.append(test_id)
            continue
        if rule != EXACT:
            result.matched_by[test_id] = f"{rule} ({len(found)})"
        if statuses == {status}:
            result.as_expected.append(test_id)
        else:
            result.otherwise[test_id] = ", ".join(sorted(statuses))
    return result


def is_full(test_id: str) -> bool:
    """Whether the id names one test by itself: with its path, and not cut at a blank."""
    return "::" in test_id and not is_cut(test_id)


def is_cut(test_id: str) -> bool:
    return "[" in test_id.rpartition("::")[2] and not test_id.endswith("]")


def path_of(test_id: str) -> str | None:
    """The test file of an id with a path, relative to where the tests run."""
    path, separator, _ = test_id.partition("::")
    return path if separator else None


class _Index:
    """The seen ids, by each of the ways in which one may be meant."""

    def __init__(self, seen: Iterable[str]) -> None:
        self._ids = set(seen)
        self._sorted = sorted(self._ids)
        self._dotted = _grouped((dotted(test_id), test_id) for test_id in self._ids)
        names = [(_name(test_id), test_id) for test_id in self._ids]
        self._names = _grouped(names)
        self._sorted_names = sorted(self._names)
        self._bare_names = _grouped((name.partition("[")[0], test_id) for name, test_id in names)
        self._suffixes: dict[str, list[str]] | None = None

    def find(self, test_id: str) -> tuple[str, list[str]]:
        """(rule, seen ids that are meant)"""
        if test_id in self._ids:
            return EXACT, [test_id]
        if "::" in test_id or not is_cut(test_id):
            found = self._dotted.get(dotted(test_id), [])
            if found:
                return EXACT, found
        if "::" in test_id:
            return "prefix", _begin_with(self._sorted, test_id) if is_cut(test_id) else []
        if test_id in self._names:
            return "name", self._names[test_id]
        if is_cut(test_id):
            names = _begin_with(self._sorted_names, test_id)
            return "name prefix", [seen_id for name in names for seen_id in self._names[name]]
        if test_id in self._bare_names:
            return "name without parameters", self._bare_names[test_id]
        return "suffix", self._by_suffix(test_id)

    def _by_suffix(self, test_id: str) -> list[str]:
        if self._suffixes is None:
            self._suffixes = _grouped(
                (suffix, seen_id)
                for whole, ids in self._dotted.items()
                for suffix in _suffixes(whole)
                for seen_id in ids
            )
        return self._suffixes.get(test_id, [])


def _name(test_id: str) -> str:
    """`Class.method[parameters]` of a pytest id; another id as it is."""
    path, separator, name = test_id.partition("::")
    head, bracket, parameters = name.partition("[")
    return head.replace("::", ".") + bracket + parameters if separator else path


def _suffixes(whole: str) -> list[str]:
    head, bracket, parameters = whole.partition("[")
    parts = head.split(".")
    return [".".join(parts[start:]) + bracket + parameters for start in range(1, len(parts))]


def _begin_with(ordered: list[str], prefix: str) -> list[str]:
    start = bisect.bisect_left(ordered, prefix)
    found = []
    for candidate in ordered[start:]:
        if not candidate.startswith(prefix):
            break
        found.append(candidate)
    return found


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return dict(groups)
