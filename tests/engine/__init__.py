"""polarq against a real vLLM server that runs a tiny random model on the CPU: `make test-engine`."""
