"""What proxies are trained on: real text and recall tasks, every batch a pure function of (seed, step)."""
