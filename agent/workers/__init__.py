"""The workers of this node: what each one runs, their start and end, and what the agent does for them while they run."""
