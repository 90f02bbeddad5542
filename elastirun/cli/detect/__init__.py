"""Detection of what was not given for a job of several nodes, from the variables of the scheduler. Pure."""
