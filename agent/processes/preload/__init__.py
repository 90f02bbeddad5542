"""Workers as forks of a process that has imported their modules before (``--preload``)."""
