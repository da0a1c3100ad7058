"""Reads how tests ended: from what a test command printed, or from the report it wrote.

Understood are pytest's lines (`PASSED <id>` of its summary, `<id> PASSED [ 50%]` of -v, with colour and xdist's
prefixes), those of `unittest -v`, JUnit XML, and JSON (a map of id to status, or pytest-json-report's shape).

Where the same id is told twice, the worse status holds: code under test may print lines of its own.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from polarq.contracts.evaluators import TestStatus
from polarq_worker.evaluators.numbers import unambiguous

Statuses = dict[str, TestStatus]

_WORSE = [
    TestStatus.PASSED,
    TestStatus.XPASS,
    TestStatus.XFAIL,
    TestStatus.SKIPPED,
    TestStatus.FAILED,
    TestStatus.ERROR,
]
_WORDS = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
_XDIST = re.compile(r"^\[gw\d+\]\s*(?:\[\s*\d+%\]\s*)?")
_XDIST_INSIDE = re.compile(r"\s+(?=\[gw\d+\] \[\s*\d+%\] )")
_SUMMARY = re.compile(rf"^({_WORDS})\s+(\S.*)$")
_NO_ID = re.compile(r"^(?:\[\d+\] |\(\w+(?: \w+)?=\d+)")
"""`SKIPPED [3] tests/test_x.py:12: reason` folds tests and names none; `FAILED (failures=1)` is unittest's total."""
_VERBOSE = re.compile(rf"^(\S.*?::.*?)\s+({_WORDS})(?:\s+\(.*\))?(?:\s+\[\s*\d+%\])?$")
_UNITTEST = re.compile(r"^(\w+) \(([\w.]+)\)(?: \[.*\]| \(.*\))?(?P<rest>.*)$")
_UNITTEST_HEADER = re.compile(r"^(FAIL|ERROR): (\w+) \(([\w.]+)\)")
_UNITTEST_WORDS = {
    "ok": TestStatus.PASSED,
    "FAIL": TestStatus.FAILED,
    "ERROR": TestStatus.ERROR,
    "expected failure": TestStatus.XFAIL,
    "unexpected success": TestStatus.XPASS,
}
_JSON_WORDS = {
    "PASS": TestStatus.PASSED,
    "OK": TestStatus.PASSED,
    "FAIL": TestStatus.FAILED,
    "SKIP": TestStatus.SKIPPED,
    "XFAILED": TestStatus.XFAIL,
    "XPASSED": TestStatus.XPASS,
}


def worst(found: Iterable[tuple[str, TestStatus]]) -> Statuses:
    """One status per id."""
    statuses: Statuses = {}
    for test_id, status in found:
        known = statuses.get(test_id, status)
        statuses[test_id] = max(known, status, key=_WORSE.index)
    return statuses


def from_output(text: str, known_ids: Collection[str] = ()) -> Statuses:
    """Statuses in what a command printed. `known_ids` (full ids) tell where an id ends that has ` - ` in it."""
    return worst(_lines(text, known_ids))


def from_report(data: bytes) -> Statuses:
    """Statuses in a report file. Raises ValueError when it is neither JUnit XML nor JSON that is understood."""
    head = data.lstrip()[:1]
    if head == b"<":
        return worst(_junit(data))
    if head in {b"{", b"["}:
        return worst(_json(_loaded(data)))
    raise ValueError("it is neither XML nor JSON")


def _loaded(data: bytes) -> Any:
    try:
        return json.loads(data, object_pairs_hook=unambiguous)
    except RecursionError:
        raise ValueError("it is JSON that is nested too deep") from None


def dotted(test_id: str) -> str:
    """One notation for what pytest (`a/b.py::C::t`), JUnit and unittest (`a.b.C.t`) call the same test."""
    name, bracket, parameters = test_id.partition("[")
    name = name.replace(".py::", "::").replace("::", ".").replace("/", ".")
    return name.removeprefix(".") + bracket + parameters


def _lines(text: str, known_ids: Collection[str]) -> Iterator[tuple[str, TestStatus]]:
    pending = ""
    for whole in _ANSI.sub("", text).split("\n"):
        for part in _XDIST_INSIDE.split(whole.rstrip()):
            line = _XDIST.sub("", part)
            if match := _SUMMARY.match(line):
                if not _NO_ID.match(match.group(2)):
                    yield _id_of(match.group(2), known_ids), TestStatus(match.group(1))
            elif match := _VERBOSE.match(line):
                yield match.group(1), TestStatus(match.group(2))
            elif match := _UNITTEST_HEADER.match(line):
                yield _unittest_id(match.group(2), match.group(3)), _UNITTEST_WORDS[match.group(1)]
            elif match := _UNITTEST.match(line):
                pending = _unittest_id(match.group(1), match.group(2))
                if status := _unittest_status(match.group("rest")):
                    yield pending, status
                    pending = ""
            elif pending and (status := _unittest_status(line)):
                # The test's docstring, or something it printed, came between.
                yield pending, status
                pending = ""


def _id_of(rest: str, known_ids: Collection[str]) -> str:
    """The id at the beginning of `<id>` or `<id> - <message>`; an id may have ` - ` in its brackets."""
    cuts = [match.start() for match in re.finditer(" - ", rest)]
    for cut in (len(rest), *reversed(cuts)):
        if rest[:cut] in known_ids:
            return rest[:cut]
    name_at = rest.find("::") + 2
    bracket = rest.find("[", name_at) if name_at > 1 else -1
    first = next((cut for cut in cuts if cut >= name_at), len(rest))
    if 0 <= bracket < first:
        closed = rest.find("] - ", bracket)
        return rest if closed < 0 else rest[: closed + 1]
    return rest[:first]


def _unittest_id(name: str, place: str) -> str:
    return place if place.endswith(f".{name}") else f"{place}.{name}"


def _unittest_status(text: str) -> TestStatus | None:
    word = text.rpartition("... ")[2].strip() if "... " in text else text.strip()
    return TestStatus.SKIPPED if word.startswith("skipped ") else _UNITTEST_WORDS.get(word)


def _junit(data: bytes) -> Iterator[tuple[str, TestStatus]]:
    if b"<!ENTITY" in data or b"<!DOCTYPE" in data:
        raise ValueError("it declares entities, which no test report needs")
    try:
        root = ET.fromstring(data)  # noqa: S314  (no entities)
    except ET.ParseError as exc:
        raise ValueError(f"it is not well-formed XML ({exc})") from None
    for case in root.iter("testcase"):
        yield _junit_id(case), _junit_status(case)


def _junit_id(case: ET.Element) -> str:
    name, place, file = case.get("name", ""), case.get("classname", ""), case.get("file")
    if not file:
        return f"{place}.{name}" if place else name
    module = file.removesuffix(".py").replace("/", ".")
    inner = place.removeprefix(module).strip(".") if place.startswith(module) else ""
    return "::".join([file, *(inner.split(".") if inner else []), name])


def _junit_status(case: ET.Element) -> TestStatus:
    kinds = {child.tag: child for child in case}
    if "error" in kinds:
        return TestStatus.ERROR
    if "failure" in kinds:
        return TestStatus.FAILED
    if "skipped" in kinds:
        return TestStatus.XFAIL if kinds["skipped"].get("type") == "pytest.xfail" else TestStatus.SKIPPED
    return TestStatus.PASSED


def _json(data: Any) -> Iterator[tuple[str, TestStatus]]:
    tests = data.get("tests") if isinstance(data, dict) and isinstance(data.get("tests"), list) else data
    if isinstance(tests, dict):
        pairs = list(tests.items())
    elif isinstance(tests, list) and all(isinstance(test, dict) for test in tests):
        pairs = [(test.get("nodeid", test.get("name")), test.get("outcome", test.get("status"))) for test in tests]
    else:
        raise ValueError("it is JSON, but neither a map of test id to status nor a list of tests")
    for test_id, word in pairs:
        upper = str(word).upper()
        try:
            yield str(test_id), _JSON_WORDS.get(upper) or TestStatus(upper)
        except ValueError:
            raise ValueError(f"it has an unknown status '{word}' for '{test_id}'") from None
