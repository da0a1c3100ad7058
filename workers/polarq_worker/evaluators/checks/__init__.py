"""Programs that judge what a policy wrote, each run by itself in a sandbox (`evaluators.apart`).

Each is one file that needs nothing of polarq: a JSON request on stdin, a JSON reply on stdout, exit code 87
where Python has no memory left.
"""
