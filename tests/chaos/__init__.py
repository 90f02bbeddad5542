"""Real agents, real cuts: see ``python -m tests.chaos --help``."""
