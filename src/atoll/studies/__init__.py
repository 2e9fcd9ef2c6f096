"""Studies: a grid of recipes, what is measured of each run, tables, and claims that are checked."""

from atoll.studies.base import STUDIES, Cell, Claim, Found, Study, StudyReport
from atoll.studies.engine import run_study
from atoll.studies.table import Column, Table

__all__ = ["STUDIES", "Cell", "Claim", "Column", "Found", "Study", "StudyReport", "Table", "run_study"]
