"""What can go wrong with an export."""


class ExportError(ValueError):
    """A trial that cannot be exported, or a folder that cannot be written; one line."""


class WriteError(ExportError):
    """Writing was begun and did not come to its end, as on a full disk; nothing is left of it."""
