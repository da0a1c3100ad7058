"""Fills `{{INSTRUCTION}}` into a shell command so that nothing in the instruction is ever read as shell.

The text itself is never pasted: the placeholder becomes an expansion of a variable that was read from the instruction
file, quoted for the place where it stands. Bash does not parse the result of an expansion again, so quotes, `$(...)`,
backticks and newlines in an instruction stay text even where this reading of the command were wrong.

    agent -p {{INSTRUCTION}}        agent -p "${__polarq_instruction}"
    agent -p "Task: {{INSTRUCTION}}"  agent -p "Task: ${__polarq_instruction}"
    agent -p 'Task: {{INSTRUCTION}}'  agent -p 'Task: '"${__polarq_instruction}"''
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from polarq.errors import InvalidTask

PLACEHOLDER = re.compile(r"\{\{\s*INSTRUCTION\s*\}\}")
EXPANSION = "${__polarq_instruction}"
PREAMBLE = "IFS= read -r -d '' __polarq_instruction < \"$POLARQ_INSTRUCTION_FILE\"\n"
"""`read` with an empty delimiter takes the whole file, final newline included (and reports its end as a failure)."""
_HEREDOC = re.compile(r"<<(-?)[ \t]*((?:[^\s\\'\"`$()<>;&|]|\\.|'[^']*'|\"[^\"]*\")+)")
_IN_HEREDOC = re.compile(r"(\\*)" + PLACEHOLDER.pattern)
_WORD_BREAKS = " \t\n;&|()<>"


def with_instruction(command: str) -> str:
    """The command with every placeholder filled in; unchanged when it has none.

    Raises `InvalidTask` for a placeholder in a here-document with a quoted delimiter, where nothing is expanded.
    """
    if not PLACEHOLDER.search(command):
        return command
    return PREAMBLE + _Filler(command).command()


@dataclass(slots=True)
class _Heredoc:
    delimiter: str
    strip_tabs: bool
    raw: bool


class _Filler:
    """Walks through a command once, with the few rules of the shell's quoting that decide where a place is."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._out: list[str] = []
        self._heredocs: list[_Heredoc] = []

    def command(self) -> str:
        self._unquoted(end="")
        return "".join(self._out)

    def _unquoted(self, end: str) -> None:
        """Up to `end`: nothing, the parenthesis that closes `$(`, or a backtick."""
        depth = 0
        while self._at < len(self._text):
            char = self._text[self._at]
            if self._fill(f'"{EXPANSION}"') or self._escape("") or self._arithmetic():
                continue
            if char == end and depth == 0:
                self._copy(1)
                return
            if char == "'":
                self._single("'")
            elif self._starts("$'"):
                self._copy(1)
                self._single("$'")
            elif char == '"':
                self._double()
            elif self._starts("$("):
                self._copy(2)
                self._unquoted(end=")")
            elif char == "`":
                self._copy(1)
                self._unquoted(end="`")
            elif char == "#" and (self._at == 0 or self._text[self._at - 1] in _WORD_BREAKS):
                self._copy_until("\n")
            elif self._starts("<<<"):
                self._copy(3)
            elif not (self._starts("<<") and self._announce_heredoc()):
                depth += {"(": 1, ")": -1}.get(char, 0)
                self._copy(1)
                if char == "\n":
                    self._heredoc_bodies()

    def _single(self, opening: str) -> None:
        """Between single quotes; after `$'` a backslash escapes. To expand, the quotes are closed and opened again."""
        self._copy(1)
        while self._at < len(self._text):
            if self._fill(f'\'"{EXPANSION}"{opening}'):
                continue
            if opening == "$'" and self._escape("\\\\"):
                continue
            closed = self._text[self._at] == "'"
            self._copy(1)
            if closed:
                return

    def _double(self) -> None:
        self._copy(1)
        while self._at < len(self._text):
            if self._fill(EXPANSION) or self._escape("\\\\") or self._arithmetic():
                continue
            char = self._text[self._at]
            if self._starts("$("):
                self._copy(2)
                self._unquoted(end=")")
            elif char == "`":
                self._copy(1)
                self._unquoted(end="`")
            else:
                self._copy(1)
                if char == '"':
                    return

    def _arithmetic(self) -> bool:
        """`((...))` and `$((...))`: `<<` shifts there, and an instruction is no number."""
        if not (self._starts("$((") or self._starts("((")):
            return False
        end = self._text.find("))", self._at)
        if end < 0:
            return False
        self._copy(end + 2 - self._at)
        return True

    def _announce_heredoc(self) -> bool:
        match = _HEREDOC.match(self._text, self._at)
        if match is None:
            return False
        word = match.group(2)
        delimiter = re.sub(r"\\(.)|['\"]", r"\1", word)
        self._heredocs.append(_Heredoc(delimiter, match.group(1) == "-", delimiter != word))
        self._copy(match.end() - self._at)
        return True

    def _heredoc_bodies(self) -> None:
        waiting, self._heredocs = self._heredocs, []
        for heredoc in waiting:
            while self._at < len(self._text):
                start = self._at
                end = self._text.find("\n", start)
                end = len(self._text) if end < 0 else end + 1
                line = self._text[start:end]
                if heredoc.raw and PLACEHOLDER.search(line):
                    problem = (
                        f"'{{{{INSTRUCTION}}}}' is in the here-document '{heredoc.delimiter}', whose quoted delimiter"
                        " lets nothing be expanded; take the quotes off, or read $POLARQ_INSTRUCTION_FILE"
                    )
                    raise InvalidTask("agent.custom_shell.command", [problem])
                self._out.append(line if heredoc.raw else _IN_HEREDOC.sub(_expanded_in_heredoc, line))
                self._at = end
                bare = line.rstrip("\n")
                if (bare.lstrip("\t") if heredoc.strip_tabs else bare) == heredoc.delimiter:
                    break

    def _fill(self, replacement: str) -> bool:
        match = PLACEHOLDER.match(self._text, self._at)
        if match is None:
            return False
        self._out.append(replacement)
        self._at = match.end()
        return True

    def _escape(self, before_placeholder: str) -> bool:
        """A backslash and what it escapes. Before a placeholder it would escape the expansion's own first character;
        there it becomes what the shell makes of `\\{` in this place."""
        if not self._starts("\\"):
            return False
        if PLACEHOLDER.match(self._text, self._at + 1):
            self._out.append(before_placeholder)
            self._at += 1
        else:
            self._copy(2)
        return True

    def _starts(self, text: str) -> bool:
        return self._text.startswith(text, self._at)

    def _copy(self, length: int) -> None:
        self._out.append(self._text[self._at : self._at + length])
        self._at += length

    def _copy_until(self, char: str) -> None:
        end = self._text.find(char, self._at)
        self._copy((len(self._text) if end < 0 else end) - self._at)


def _expanded_in_heredoc(match: re.Match[str]) -> str:
    backslashes = match.group(1)
    return backslashes + ("\\" if len(backslashes) % 2 else "") + EXPANSION
