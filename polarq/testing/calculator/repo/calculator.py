"""Arithmetic expressions, by recursive descent along this grammar:

expression := term (("+" | "-") term)*
term       := factor (("*" | "/") factor)*
factor     := "-" factor | "(" expression ")" | NUMBER
"""

import re

TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?)|(\S))")


class CalculatorError(ValueError):
    """The text is not an expression, or has no value."""


def tokenize(text):
    """The numbers (as floats) and the signs (as strings) of `text`."""
    return [float(number) if number else sign for number, sign in TOKEN.findall(text)]


class Parser:
    def __init__(self, text):
        self.tokens = tokenize(text)

    def peek(self):
        return self.tokens[0] if self.tokens else None

    def take(self):
        return self.tokens.pop(0) if self.tokens else None

    def expression(self):
        value = self.term()
        while self.peek() in ("+", "-", "*", "/"):
            operator = self.take()
            right = self.term()
            if operator == "+":
                value += right
            elif operator == "-":
                value -= right
            elif operator == "*":
                value *= right
            else:
                value /= right
        return value

    def term(self):
        # TODO: "*" and "/" belong here, not into expression()
        return self.factor()

    def factor(self):
        # TODO: parentheses and the minus sign
        token = self.take()
        if not isinstance(token, float):
            raise CalculatorError(f"a number was expected, not {token!r}")
        return token


def evaluate(text):
    """The value of the expression `text` as a float. Raises CalculatorError."""
    parser = Parser(text)
    return parser.expression()
