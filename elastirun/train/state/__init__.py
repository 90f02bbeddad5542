"""The state of a run as a tree of named values, which checkpoints save and live workers send each other."""
