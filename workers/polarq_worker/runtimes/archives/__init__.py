"""Tar archives: of what comes out of a sandbox, believed in nothing, and of what goes into one."""
