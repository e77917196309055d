"""What can go wrong with an export."""


class ExportError(ValueError):
    """A trial that cannot be exported, or a folder that cannot be written; one line."""
