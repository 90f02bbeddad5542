"""The end of training by request: all ranks stop after the same step."""
