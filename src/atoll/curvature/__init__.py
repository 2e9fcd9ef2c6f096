"""How flat a model is: Hessian traces, Weight-Curvature Index, spectrum, landscapes, PAC-Bayes bounds."""

from atoll.curvature.gap import Gap, robust_gap
from atoll.curvature.landscape import Landscape, input_landscape, weight_landscape
from atoll.curvature.pac_bayes import PACBayesBounds, gibbs_risk, pac_bayes
from atoll.curvature.risk import EmpiricalRisk
from atoll.curvature.spectrum import Density, density, top_eigenvalues
from atoll.curvature.trace import Estimator, Traces, hessian, traces
from atoll.curvature.wci import WCI, wci
from atoll.stats import Estimate

__all__ = [
    "WCI",
    "Density",
    "EmpiricalRisk",
    "Estimate",
    "Estimator",
    "Gap",
    "Landscape",
    "PACBayesBounds",
    "Traces",
    "density",
    "gibbs_risk",
    "hessian",
    "input_landscape",
    "pac_bayes",
    "robust_gap",
    "top_eigenvalues",
    "traces",
    "wci",
    "weight_landscape",
]
