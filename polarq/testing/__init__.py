"""Real stand-ins that ship with polarq, so that its users test as it tests itself."""
