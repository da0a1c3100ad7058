#!/bin/bash
# One number for each thing that was asked for: the reward is their mean.
python3 "${TEST_DIR:-/tests}/check.py" report.json > "${VERIFIER_DIR:-/logs/verifier}/reward.json"
