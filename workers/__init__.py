"""Where segments run: a pool of Ray actors, one per slot. Importing this package imports neither Ray nor torch."""
