"""Knowledge of the other nodes: who lives, which rows to read, who counts. Pure."""
