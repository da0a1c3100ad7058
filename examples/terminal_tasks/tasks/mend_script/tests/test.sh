#!/bin/bash
folder=$(mktemp -d)
mkdir "$folder/my files"
echo one > "$folder/my files/a"
echo two > "$folder/my files/b c"
bash backup.sh "$folder/my files" "$folder/new/copy"
if diff -r "$folder/my files" "$folder/new/copy"; then echo 1; else echo 0; fi > "${VERIFIER_DIR:-/logs/verifier}/reward.txt"
