"""From trials to folders that other tools load."""

from nas.export.errors import ExportError, WriteError
from nas.export.hub import export_trials

__all__ = ["ExportError", "WriteError", "export_trials"]
