"""Runtime `harbor`: any environment of the package of that name, each with its own credentials."""
