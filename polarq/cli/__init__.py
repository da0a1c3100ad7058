"""The command line: one file per command, every one with `--json`, the exit code is the outcome."""
