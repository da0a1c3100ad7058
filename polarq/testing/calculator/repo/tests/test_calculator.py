import unittest

from calculator import CalculatorError, evaluate


class CalculatorTest(unittest.TestCase):
    def test_a_number_is_its_own_value(self):
        self.assertEqual(evaluate("42"), 42.0)
        self.assertEqual(evaluate(" 0.5 "), 0.5)

    def test_addition_and_subtraction_go_from_left_to_right(self):
        self.assertEqual(evaluate("10 - 4 - 3 + 1"), 4.0)

    def test_division_goes_from_left_to_right(self):
        self.assertEqual(evaluate("100 / 10 / 5"), 2.0)

    def test_multiplication_binds_tighter_than_addition(self):
        self.assertEqual(evaluate("2 + 3 * 4"), 14.0)
        self.assertEqual(evaluate("20 - 6 / 2 * 3"), 11.0)

    def test_parentheses_come_first(self):
        self.assertEqual(evaluate("(2 + 3) * 4"), 20.0)

    def test_parentheses_nest(self):
        self.assertEqual(evaluate("2 * ((1 + 2) * (3 - (4 - 2)))"), 6.0)

    def test_a_minus_sign_negates(self):
        self.assertEqual(evaluate("-2 + 5"), 3.0)
        self.assertEqual(evaluate("3 - -(1 + 1)"), 5.0)
        self.assertEqual(evaluate("2 * -3"), -6.0)

    def test_division_by_zero_is_a_calculator_error(self):
        for text in ("1 / 0", "1 / (2 - 2)"):
            with self.subTest(text), self.assertRaises(CalculatorError):
                evaluate(text)

    def test_leftover_text_is_refused(self):
        for text in ("1 2", "(1 + 2", "1 + 2)", "3 $"):
            with self.subTest(text), self.assertRaises(CalculatorError):
                evaluate(text)

    def test_an_empty_text_is_refused(self):
        for text in ("", "   ", "1 +"):
            with self.subTest(text), self.assertRaises(CalculatorError):
                evaluate(text)


if __name__ == "__main__":
    unittest.main()
