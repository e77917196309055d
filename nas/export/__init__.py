"""From trials to folders that other tools load."""

from nas.export.errors import ExportError
from nas.export.hub import export_trials

__all__ = ["ExportError", "export_trials"]
