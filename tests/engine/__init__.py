"""polarq against a real inference server: a vLLM on the CPU with a tiny random model, or any that runs already."""
