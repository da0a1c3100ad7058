#!/bin/bash
# The service is asked twice, by other names each time: what answers once by chance does not count.
python3 "${TEST_DIR:-/tests}/ask.py" && python3 "${TEST_DIR:-/tests}/ask.py"
if [ $? -eq 0 ]; then echo 1; else echo 0; fi > "${VERIFIER_DIR:-/logs/verifier}/reward.txt"
