"""Curvature of the loss: Hessian traces, Weight-Curvature Index, spectra, landscapes, PAC-Bayes bounds."""

from atoll.curvature.gap import Gap, robust_gap
from atoll.curvature.landscape import Landscape, input_landscape, weight_landscape
from atoll.curvature.pac_bayes import PACBayesBounds, PACBayesProof, gibbs_risk, pac_bayes, pac_bayes_proof
from atoll.curvature.products import HessianProducts, hessian
from atoll.curvature.risk import EmpiricalRisk
from atoll.curvature.spectrum import Density, density, top_eigenvalues
from atoll.curvature.trace import Estimator, Traces, traces
from atoll.curvature.wci import WCI, LayerwiseBound, layerwise_bound, wci
from atoll.stats import Estimate

__all__ = [
    "WCI",
    "Density",
    "EmpiricalRisk",
    "Estimate",
    "Estimator",
    "Gap",
    "HessianProducts",
    "Landscape",
    "LayerwiseBound",
    "PACBayesBounds",
    "PACBayesProof",
    "Traces",
    "density",
    "gibbs_risk",
    "hessian",
    "input_landscape",
    "layerwise_bound",
    "pac_bayes",
    "pac_bayes_proof",
    "robust_gap",
    "top_eigenvalues",
    "traces",
    "wci",
    "weight_landscape",
]
