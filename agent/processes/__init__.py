"""Processes: started, watched, and all ended when the agent is, also by its guard."""
