"""Traffic beside the task: titles, compactions, commit messages, probes. Told by data, one file per harness."""
