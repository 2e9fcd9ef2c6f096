"""Studies: grids of recipes with measurements, tables and claims."""

from atoll.studies.base import STUDIES, Cell, Claim, Study, StudyReport, StudyResults
from atoll.studies.engine import run_study
from atoll.studies.table import Column, Table

__all__ = ["STUDIES", "Cell", "Claim", "Column", "Study", "StudyReport", "StudyResults", "Table", "run_study"]
