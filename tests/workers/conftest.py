"""Makes fake_runners importable here and, through the driver's sys.path, in workers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
