"""The languages that harnesses speak, one file each."""
