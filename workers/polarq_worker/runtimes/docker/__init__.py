"""Runtime `docker`: sandboxes as containers, through the Engine API of Docker (or of Podman's socket)."""
