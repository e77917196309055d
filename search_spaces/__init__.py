"""Search spaces: what may vary, the proxy, the workload, the rungs and the memory budget; their YAML and its schema."""

from search_spaces.loading import SpaceError, load_space, preset_names
from search_spaces.schema import SearchSpace

__all__ = ["SearchSpace", "SpaceError", "load_space", "preset_names"]
