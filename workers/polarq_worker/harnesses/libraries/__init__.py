"""Agents that are written with a library: one preset a library, which runs the user's own script or function."""
