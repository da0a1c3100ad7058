"""How repositories of SWE-bench are tested, for rows that do not say it themselves.

Rows as of swebench 5 bring their script (`eval_script`) and the name of its log parser. Rows of before have a version
only; the commands for them were in the package, up to 4.1 (`MAP_REPO_VERSION_TO_SPECS`, MIT), and are here for the
twelve repositories of SWE-bench Verified. The parsers are those that the package still has for these repositories.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

ACTIVATE = "source /opt/miniconda3/bin/activate\nconda activate testbed"
"""What the data set's images need before their Python is the repository's."""
NOT_TESTS = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
_TOUCHED = re.compile(r"^diff --git a/.+ b/(.+)$(?!\ndeleted file mode)", re.MULTILINE)
_UTF8 = "export LANG=en_US.UTF-8 LANGUAGE=en_US:en LC_ALL=en_US.UTF-8 PYTHONIOENCODING=utf8"
_DJANGO = "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1"


@dataclass(frozen=True)
class Known:
    """`command` takes test files as arguments; `setup` is run before it."""

    command: str = "pytest -rA"
    parser: str = "parse_log_pytest"
    setup: str = ""


KNOWN = {
    "astropy/astropy": Known(parser="parse_log_pytest_v2"),
    "django/django": Known(_DJANGO, "parse_log_django", _UTF8),
    "matplotlib/matplotlib": Known(parser="parse_log_matplotlib"),
    "mwaskom/seaborn": Known("pytest --no-header -rA", "parse_log_seaborn"),
    "pallets/flask": Known(),
    "psf/requests": Known(parser="parse_log_pytest_options"),
    "pydata/xarray": Known(),
    "pylint-dev/pylint": Known(parser="parse_log_pytest_options"),
    "pytest-dev/pytest": Known(),
    "scikit-learn/scikit-learn": Known(parser="parse_log_pytest_v2"),
    "sphinx-doc/sphinx": Known("tox --current-env -epy39 -v --", "parse_log_pytest_v2"),
    "sympy/sympy": Known(
        "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose", "parse_log_sympy"
    ),
}
_OLD_VERSIONS = {
    ("django/django", "1.9"): "./tests/runtests.py --verbosity 2",
    **{
        ("astropy/astropy", version): "pytest -rA -vv -o console_output_style=classic --tb=no"
        for version in ("0.1", "0.2", "0.3", "0.4", "1.1", "1.2", "1.3")
    },
}
# As the package did, what is tested is installed anew: some was not installed to follow its sources. Without the
# network, so from what the image has; where that does not do, what was installed stays.
_INSTALL = "python -m pip install --quiet --no-deps --no-build-isolation -e . || true"


def touched(test_patch: str) -> list[str]:
    """The files with tests that a patch leaves, in its order."""
    return [path for path in dict.fromkeys(_TOUCHED.findall(test_patch)) if not path.endswith(NOT_TESTS)]


def of_swebench(row: Mapping[str, Any]) -> Known:
    """The whole command of a row that has no script of its own, and its parser."""
    repo, files = row["repo"], touched(row["test_patch"])
    known = KNOWN.get(repo, Known())
    command = _OLD_VERSIONS.get((repo, str(row.get("version", ""))), known.command)
    if repo == "django/django":  # takes modules
        files = [path.removesuffix(".py").removeprefix("tests/").replace("/", ".") for path in files]
    before = [ACTIVATE, *([known.setup] if known.setup else []), _INSTALL]
    return replace(known, command="\n".join([*before, f"{command} {shlex.join(files)}"]))
