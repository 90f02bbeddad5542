"""The worker's end, without torch: its link to the agent of its node, and the stamps of its steps."""
