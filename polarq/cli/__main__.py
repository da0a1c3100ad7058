"""`python -m polarq.cli` is the same as `polarq`."""

from polarq.cli.main import run

if __name__ == "__main__":
    run()
