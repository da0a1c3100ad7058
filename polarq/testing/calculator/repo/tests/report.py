"""Runs the tests and prints one line for each: PASSED, FAILED, ERROR or SKIPPED, and the test's id.

Start it with `python3 -m tests.report`.
"""

import sys
import unittest
from pathlib import Path

FOLDER = Path(__file__).parent


class Report(unittest.TestResult):
    def __init__(self):
        super().__init__()
        self.outcomes = {}

    def startTest(self, test):  # noqa: N802
        super().startTest(test)
        self.outcomes[name_of(test)] = "PASSED"

    def addSubTest(self, test, subtest, err):  # noqa: N802
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.outcomes[name_of(test)] = "FAILED" if issubclass(err[0], test.failureException) else "ERROR"

    def addFailure(self, test, err):  # noqa: N802
        super().addFailure(test, err)
        self.outcomes[name_of(test)] = "FAILED"

    def addError(self, test, err):  # noqa: N802
        super().addError(test, err)
        self.outcomes[name_of(test)] = "ERROR"

    def addSkip(self, test, reason):  # noqa: N802
        super().addSkip(test, reason)
        self.outcomes[name_of(test)] = "SKIPPED"


def name_of(test):
    """`tests/test_calculator.py::CalculatorTest::test_x`, whatever went wrong with it."""
    module, _, rest = test.id().partition(".CalculatorTest.")
    return f"tests/{module.rpartition('.')[2]}.py" + (f"::CalculatorTest::{rest}" if rest else "")


def main():
    report = Report()
    suite = unittest.defaultTestLoader.discover(str(FOLDER), top_level_dir=str(FOLDER.parent))
    suite.run(report)
    for name, outcome in sorted(report.outcomes.items()):
        sys.stdout.write(f"{outcome} {name}\n")
    for test, text in report.failures + report.errors:
        sys.stderr.write(f"\n{name_of(test)}\n{text}\n")
    return 0 if report.outcomes and report.wasSuccessful() else 1


if __name__ == "__main__":
    raise SystemExit(main())
