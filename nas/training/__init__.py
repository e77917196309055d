"""Training of proxies: data, optimisers, schedule, checkpoints, and the segment runner that workers call."""
