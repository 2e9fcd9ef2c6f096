"""How flat a model is: Hessian traces, Weight-Curvature Index, spectrum, landscapes, PAC-Bayes bounds."""

from atoll.curvature.correlation import Analysis, Fit, analyse, fit
from atoll.curvature.dense import hessian
from atoll.curvature.estimate import Estimate
from atoll.curvature.gap import Gap, robust_gap
from atoll.curvature.gibbs import Bounds, gibbs_risk, pac_bayes
from atoll.curvature.landscape import Landscape, input_landscape, weight_landscape
from atoll.curvature.moments import Moments, moments
from atoll.curvature.problem import Problem
from atoll.curvature.spectrum import Density, all_eigenvalues, density, top_eigenvalues
from atoll.curvature.top_layer import top_layer
from atoll.curvature.trace import Estimator, Traces, traces
from atoll.curvature.wci import WCI, wci

__all__ = [
    "WCI",
    "Analysis",
    "Bounds",
    "Density",
    "Estimate",
    "Estimator",
    "Fit",
    "Gap",
    "Landscape",
    "Moments",
    "Problem",
    "Traces",
    "all_eigenvalues",
    "analyse",
    "density",
    "fit",
    "gibbs_risk",
    "hessian",
    "input_landscape",
    "moments",
    "pac_bayes",
    "robust_gap",
    "top_eigenvalues",
    "top_layer",
    "traces",
    "wci",
    "weight_landscape",
]
