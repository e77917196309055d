"""One file a revision, never edited after its release; a real database of each one is in tests/store/data."""
