"""Studies, their metadata, trials and measurements."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    _create_studies()
    _create_trials()
    _create_measurements()


def _finite(table: str, column: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(f"{column} BETWEEN -1e308 AND 1e308", name=f"ck_{table}_finite_{column}")


def _create_studies() -> None:
    op.create_table(
        "nas_studies",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("space", sa.Text, nullable=False),
        sa.Column("space_digest", sa.String(64), nullable=False),
        sa.Column("seed", sa.BigInteger, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_nas_studies"),
        sa.UniqueConstraint("name", name="uq_nas_studies_name"),
    )
    op.create_table(
        "nas_study_meta",
        sa.Column("study_id", sa.Integer, nullable=False),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("value", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("study_id", "key", name="pk_nas_study_meta"),
        sa.ForeignKeyConstraint(
            ["study_id"], ["nas_studies.id"], name="fk_nas_study_meta_nas_studies", ondelete="CASCADE"
        ),
    )


def _create_trials() -> None:
    op.create_table(
        "nas_trials",
        sa.Column("study_id", sa.Integer, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("failure", sa.String(16)),
        sa.Column("message", sa.Text),
        sa.Column("traceback", sa.Text),
        sa.Column("candidate", sa.Text, nullable=False),
        sa.Column("candidate_digest", sa.String(64), nullable=False),
        sa.Column("architecture_digest", sa.String(64), nullable=False),
        sa.Column("params", sa.Text, nullable=False),
        sa.Column("sampler_state", sa.Text, nullable=False),
        sa.Column("facts", sa.Text, nullable=False),
        sa.Column("prior", sa.String(16), nullable=False),
        sa.Column("rung", sa.Integer, nullable=False),
        sa.Column("target_rung", sa.Integer, nullable=False),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("checkpoint", sa.Text),
        sa.Column("recall", sa.Double),
        sa.Column("recall_nll", sa.Double),
        sa.Column("loss", sa.Double),
        sa.Column("seconds", sa.Double, nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("started_at", _TIME),
        sa.Column("finished_at", _TIME),
        sa.PrimaryKeyConstraint("study_id", "number", name="pk_nas_trials"),
        sa.ForeignKeyConstraint(["study_id"], ["nas_studies.id"], name="fk_nas_trials_nas_studies", ondelete="CASCADE"),
        sa.UniqueConstraint("study_id", "candidate_digest", name="uq_nas_trials_candidate_digest"),
        *(_finite("nas_trials", column) for column in ("recall", "recall_nll", "loss", "seconds")),
    )
    op.create_index("ix_nas_trials_state", "nas_trials", ["study_id", "state"])


def _create_measurements() -> None:
    op.create_table(
        "nas_measurements",
        sa.Column("study_id", sa.Integer, nullable=False),
        sa.Column("trial", sa.Integer, nullable=False),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("value", sa.Double, nullable=False),
        sa.Column("at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("study_id", "trial", "step", "name", name="pk_nas_measurements"),
        sa.ForeignKeyConstraint(
            ["study_id", "trial"],
            ["nas_trials.study_id", "nas_trials.number"],
            name="fk_nas_measurements_nas_trials",
            ondelete="CASCADE",
        ),
        _finite("nas_measurements", "value"),
        sqlite_with_rowid=False,
    )
