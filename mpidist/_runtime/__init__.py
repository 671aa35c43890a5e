"""Who runs, and at which level; how a process ends."""
