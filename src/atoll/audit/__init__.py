"""An audit: everything that can be said about a model in a given time, planned from measured speed, on one page."""

from atoll.audit.engine import Audit, Record, Stage, audit
from atoll.audit.plan import PlannedStep, parse_duration

__all__ = ["Audit", "PlannedStep", "Record", "Stage", "audit", "parse_duration"]
