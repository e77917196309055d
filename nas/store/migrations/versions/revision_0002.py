"""Studies keep the sizes they were searched with: `sizing` and the name for "no positions" are new in spaces.

From now on a space matches the parameters of its proxies unless it says `sizing: {parameters: free}`, which is what all
earlier studies did. A space's JSON has no nulls, so `proxy.rope_theta: null` (no positions) was left out; it is "none"
now. CLVR beside backbones none of which has a delta rule meant no routing; it is refused now, and left out here.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_STUDIES = sa.table("nas_studies", sa.column("id"), sa.column("space"), sa.column("space_digest"))


def upgrade() -> None:
    connection = op.get_bind()
    for row in connection.execute(sa.select(_STUDIES)).all():
        space = json.loads(row.space)
        if "sizing" in space:
            continue
        _complete(space)
        # the digest of nas.architecture.Frozen, by which a launch recognises the space of its study
        canonical = json.dumps(space, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(canonical.encode()).hexdigest()[:16]
        values = {"space": json.dumps(space, separators=(",", ":")), "space_digest": digest}
        connection.execute(sa.update(_STUDIES).where(_STUDIES.c.id == row.id).values(values))


def _complete(space: dict[str, Any]) -> None:
    space["sizing"] = {"parameters": "free"}
    if "routing" in space and not {"gated_deltanet", "deltanet"} & set(space.get("backbones", ())):
        space["routing"] = ["none"]
    if "proxy" in space:
        space["proxy"].setdefault("rope_theta", "none")
        softmax = space["proxy"].get("mixers", {}).get("softmax", {})
        for name in ("expand_v", "conv_size"):  # 1 and 0, the only ones that softmax took; a field it has not now
            softmax.pop(name, None)
