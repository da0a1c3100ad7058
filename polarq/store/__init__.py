"""What is too big for the ledger: captured completions and results, compact, checked and in chunks."""
