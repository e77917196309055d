"""Where segments run: a Ray actor per slot and the pool of them. Importing this package imports neither Ray nor torch."""
