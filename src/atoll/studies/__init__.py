"""The papers' tables and figures as commands; one file per study."""

from atoll.studies.accuracy_tables import RATTable, TrHTable
from atoll.studies.base import Cell, Findings, Found, Study, Verdict
from atoll.studies.black_box import RaySTable, TransferTable
from atoll.studies.boundaries import BoundarySearch
from atoll.studies.centroid_mnist import CentroidMNIST
from atoll.studies.centroid_moons import CentroidMoons
from atoll.studies.costs import RATCost, TrHCost, WCICost
from atoll.studies.engine import run_study
from atoll.studies.gloro_ablation import GloRoAblation
from atoll.studies.gloro_table import GloRoTable
from atoll.studies.learning_rates import DropSchedules, WCIRate
from atoll.studies.lipschitz_tightness import LipschitzTightness
from atoll.studies.locality import AttributionDistance, LocalityAccuracy, LocalityRobustness
from atoll.studies.rat_landscape import RATLandscape
from atoll.studies.sanity import SanityStudy
from atoll.studies.sweeps import RATEta, TrHLambda
from atoll.studies.table import Column, Table
from atoll.studies.threat_switching import ThreatSwitching
from atoll.studies.two_moons import TwoMoons
from atoll.studies.wci_correlation import WCICorrelation
from atoll.studies.wci_curves import WCICurves, WCIParts

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        TwoMoons(),
        TrHTable(),
        TrHLambda(),
        TrHCost(),
        RATTable(),
        RATEta(),
        RATCost(),
        RATLandscape(),
        TransferTable(),
        RaySTable(),
        WCICurves(),
        WCICorrelation(),
        WCIRate(),
        WCIParts(),
        DropSchedules(),
        WCICost(),
        GloRoTable(),
        GloRoAblation(),
        LipschitzTightness(),
        ThreatSwitching(),
        LocalityAccuracy(),
        LocalityRobustness(),
        AttributionDistance(),
        SanityStudy(),
        BoundarySearch(),
        CentroidMoons(),
        CentroidMNIST(),
    )
}

__all__ = ["STUDIES", "Cell", "Column", "Findings", "Found", "Study", "Table", "Verdict", "run_study"]
