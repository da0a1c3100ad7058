"""What test commands print and write is read exactly; short ids of old data sets are matched by documented rules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polarq.contracts.evaluators import TestStatus
from polarq_worker.evaluators.expectations import compare
from polarq_worker.evaluators.statuses import dotted, from_output, from_report, worst

PASSED, FAILED, ERROR, SKIPPED = TestStatus.PASSED, TestStatus.FAILED, TestStatus.ERROR, TestStatus.SKIPPED

FIELD_CASE = """\
PASSED t/test_x.py::test_p[2 x 3]
PASSED t/test_x.py::test_p[FAILED y]
PASSED t/test_x.py::test_p[]]
PASSED t/test_x.py::test_p[\\xe9 \\U0001f9ea]
PASSED t/test_x.py::test_p[two  blanks]
PASSED t/test_x.py::test_p[]
FAILED t/test_x.py::test_p[u - v] - AssertionError: assert 'u - v' != 'u - v'
\x1b[32mPASSED\x1b[0m t/test_y.py::test_c      [gw1] [ 50%] PASSED t/test_y.py::test_d
"""
FIELD_STATUSES = {
    "t/test_x.py::test_p[2 x 3]": PASSED,
    "t/test_x.py::test_p[FAILED y]": PASSED,
    "t/test_x.py::test_p[]]": PASSED,
    "t/test_x.py::test_p[\\xe9 \\U0001f9ea]": PASSED,
    "t/test_x.py::test_p[two  blanks]": PASSED,
    "t/test_x.py::test_p[]": PASSED,
    "t/test_x.py::test_p[u - v]": FAILED,
    "t/test_y.py::test_c": PASSED,
    "t/test_y.py::test_d": PASSED,
}


def test_blanks_brackets_colour_and_worker_prefixes_leave_ids_exact() -> None:
    assert from_output(FIELD_CASE) == FIELD_STATUSES
    assert from_output(FIELD_CASE.replace("      [gw1]", "\n[gw1]")) == FIELD_STATUSES


@pytest.mark.parametrize(
    ("line", "test_id", "status"),
    [
        ("ERROR t/test_z.py - ImportError: no - x", "t/test_z.py", ERROR),
        ("ERROR t/test_z.py", "t/test_z.py", ERROR),
        ("FAILED t/a.py::C::test_m - assert [1] - [2]", "t/a.py::C::test_m", FAILED),
        ("t/a.py::test_p[x FAILED y] PASSED            [ 16%]", "t/a.py::test_p[x FAILED y]", PASSED),
        ("t/a.py::test_s SKIPPED (no (good) reason)     [100%]", "t/a.py::test_s", SKIPPED),
        ("XFAIL t/a.py::test_x - known", "t/a.py::test_x", TestStatus.XFAIL),
        ("[gw0] [ 50%] FAILED t/a.py::test_f", "t/a.py::test_f", FAILED),
        ("PASSED test_calculator\r", "test_calculator", PASSED),
        ("test_x (tests.test_c.TestAdd.test_x) ... ok", "tests.test_c.TestAdd.test_x", PASSED),
        ("test_x (tests.test_c.TestAdd) ... FAIL", "tests.test_c.TestAdd.test_x", FAILED),
        ("test_x (m.C.test_x) ... skipped 'not here'", "m.C.test_x", SKIPPED),
        ("test_x (m.C.test_x) ... expected failure", "m.C.test_x", TestStatus.XFAIL),
        ("test_x (m.C.test_x)\nWhat it is about. ... ok", "m.C.test_x", PASSED),
        ("test_x (m.C.test_x) ... printed this\nok", "m.C.test_x", PASSED),
        ("test_x (m.C.test_x) ... ok\nFAIL\nFAIL: test_x (m.C.test_x) (i=1)", "m.C.test_x", FAILED),
    ],
)
def test_each_kind_of_line_is_read(line: str, test_id: str, status: TestStatus) -> None:
    assert from_output(line) == {test_id: status}


@pytest.mark.parametrize(
    "line",
    ["SKIPPED [3] tests/test_x.py:12: reason", "ERROR: file or directory not found: t.py", "PASSED", "ERROR:root:x"],
)
def test_lines_that_name_no_test_are_none(line: str) -> None:
    assert from_output(line) == {}


def test_known_ids_tell_where_an_id_ends() -> None:
    line = "FAILED t/a.py::test_p[x] - y] - AssertionError: z] - w"
    assert from_output(line, {"t/a.py::test_p[x] - y]"}) == {"t/a.py::test_p[x] - y]": FAILED}


def test_the_worse_of_two_statuses_holds() -> None:
    assert worst([("a", PASSED), ("a", ERROR), ("b", FAILED), ("b", PASSED)]) == {"a": ERROR, "b": FAILED}


TESTS = """\
import pytest, unittest

@pytest.mark.parametrize("p", ["2 x 3", "FAILED y", "]", "\\xe9 \\U0001f9ea", "two  blanks", "", "a - b", "x::y/z.py"])
def test_p(p):
    assert p != "a - b"

class TestGroup:
    def test_m(self): pass
    @pytest.mark.skip(reason="no")
    def test_s(self): pass
    @pytest.mark.xfail(reason="known")
    def test_x(self): assert 0

@pytest.fixture
def breaks():
    yield
    raise RuntimeError

def test_teardown(breaks): pass
"""
REAL = {
    "t/test_x.py::test_p[2 x 3]": PASSED,
    "t/test_x.py::test_p[FAILED y]": PASSED,
    "t/test_x.py::test_p[]]": PASSED,
    "t/test_x.py::test_p[\\xe9 \\U0001f9ea]": PASSED,
    "t/test_x.py::test_p[two  blanks]": PASSED,
    "t/test_x.py::test_p[]": PASSED,
    "t/test_x.py::test_p[a - b]": FAILED,
    "t/test_x.py::test_p[x::y/z.py]": PASSED,
    "t/test_x.py::TestGroup::test_m": PASSED,
    "t/test_x.py::TestGroup::test_s": SKIPPED,
    "t/test_x.py::TestGroup::test_x": TestStatus.XFAIL,
    "t/test_x.py::test_teardown": ERROR,
}


def run_pytest(folder: Path, *options: str) -> str:
    (folder / "t").mkdir()
    (folder / "t/test_x.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize(
    "options",
    [("-rA", "--color=no"), ("-rA", "--color=yes"), ("-v", "--color=yes"), ("-v", "-n2"), ("-rA", "-n2", "-v")],
)
def test_the_real_pytests_output_gives_exact_ids(options: tuple[str, ...], tmp_path: Path) -> None:
    seen = from_output(run_pytest(tmp_path, *options), REAL)
    # The summary folds skipped tests into lines without ids; -v does not.
    folded = {"t/test_x.py::TestGroup::test_s"} if "-v" not in options else set()
    assert seen == {test_id: status for test_id, status in REAL.items() if test_id not in folded}


@pytest.mark.parametrize("family", ["xunit1", "xunit2"])
def test_the_real_pytests_report_gives_all_of_them(family: str, tmp_path: Path) -> None:
    run_pytest(tmp_path, "-q", "--junitxml=report.xml", "-o", f"junit_family={family}")
    seen = from_report((tmp_path / "report.xml").read_bytes())
    if family == "xunit1":
        assert seen == REAL
    comparison = compare(REAL, seen)
    assert (comparison.missing, comparison.otherwise, comparison.matched_by) == ([], {}, {})


def test_the_real_unittests_output_gives_full_ids(tmp_path: Path) -> None:
    (tmp_path / "test_u.py").write_text(
        "import unittest\n"
        "class U(unittest.TestCase):\n"
        "    def test_ok(self):\n        '''What it is about.'''\n"
        "    def test_fails(self): self.fail('x')\n"
        "    @unittest.skip('no')\n    def test_s(self): pass\n"
        "    def test_sub(self):\n"
        "        for i in range(2):\n            with self.subTest(i=i): self.assertEqual(i, 0)\n"
    )
    command = [sys.executable, "-m", "unittest", "-v", "test_u"]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stderr
    assert from_output(printed) == {
        "test_u.U.test_ok": PASSED,
        "test_u.U.test_fails": FAILED,
        "test_u.U.test_s": SKIPPED,
        "test_u.U.test_sub": FAILED,
    }


@pytest.mark.parametrize(
    "report",
    [
        b'{"a::x": "PASSED", "a::y": "failed"}',
        b'{"tests": [{"nodeid": "a::x", "outcome": "passed"}, {"nodeid": "a::y", "outcome": "failed"}]}',
        b'[{"name": "a::x", "status": "pass"}, {"name": "a::y", "status": "fail"}]',
    ],
)
def test_json_reports_are_read(report: bytes) -> None:
    assert from_report(report) == {"a::x": PASSED, "a::y": FAILED}


@pytest.mark.parametrize(
    "report", [b"", b"hello", b"<a", b"[1]", b'{"a": "maybe"}', b'<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>', b"{"]
)
def test_a_report_that_is_none_is_refused(report: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        from_report(report)


def test_pytests_and_the_dotted_notation_are_the_same_test() -> None:
    assert dotted("a/b.py::C::t[x/y::z.py]") == "a.b.C.t[x/y::z.py]"
    seen = from_output("test_x (tests.test_c.TestAdd.test_x) ... ok")
    assert compare({"tests/test_c.py::TestAdd::test_x": PASSED}, seen).passed


def test_an_id_cut_at_a_blank_counts_by_all_that_begin_with_it() -> None:
    cut = {"t/test_x.py::test_p[2": PASSED}
    both = {
        "t/test_x.py::test_p[2 x 3]": PASSED,
        "t/test_x.py::test_p[2 x 4]": PASSED,
        "t/test_x.py::test_p[3]": FAILED,
    }
    comparison = compare(cut, both)
    assert (comparison.passed, comparison.matched_by) == (True, {"t/test_x.py::test_p[2": "prefix (2)"})
    assert not compare(cut, {**both, "t/test_x.py::test_p[2 x 4]": FAILED}).passed
    assert compare(cut, {"t/test_x.py::test_p[3]": PASSED}).missing == ["t/test_x.py::test_p[2"]


def test_tests_that_differ_only_after_a_blank_share_no_status() -> None:
    seen = from_output("PASSED t.py::test[a b]\nFAILED t.py::test[a c] - x")
    assert compare({"t.py::test[a b]": PASSED}, seen).passed
    comparison = compare({"t.py::test[a b]": PASSED, "t.py::test[a c]": PASSED}, seen)
    assert comparison.otherwise == {"t.py::test[a c]": "FAILED"}


SEEN = {
    "t/a.py::TestX::test_m": PASSED,
    "t/a.py::test_m": FAILED,
    "t/a.py::test_p[1]": PASSED,
    "t/a.py::test_p[2 3]": PASSED,
    "t/b.py::test_only": PASSED,
    "pkg.mod.Case.test_u": PASSED,
}


@pytest.mark.parametrize(
    ("short", "rule", "passed"),
    [
        ("TestX.test_m", "name (1)", True),
        ("test_m", "name (1)", False),
        ("test_only", "name (1)", True),
        ("test_p", "name without parameters (2)", True),
        ("test_p[2", "name prefix (1)", True),
        ("test_p[2 3]", "name (1)", True),
        ("Case.test_u", "suffix (1)", True),
        ("test_u", "suffix (1)", True),
    ],
)
def test_an_id_without_a_path_is_matched_by_a_rule_that_is_told(short: str, rule: str, passed: bool) -> None:
    comparison = compare({short: PASSED}, SEEN)
    assert (comparison.matched_by, comparison.passed) == ({short: rule}, passed)


@pytest.mark.parametrize("test_id", ["t/a.py::test", "est_only", "t/c.py::test_only", "test_p[3", "t/a.py::test_p"])
def test_nothing_else_is_near_enough(test_id: str) -> None:
    assert compare({test_id: PASSED}, SEEN).missing == [test_id]


def test_an_empty_expectation_is_never_passed() -> None:
    assert not compare({}, SEEN).passed
    assert not compare({"a": PASSED}, {}).passed
