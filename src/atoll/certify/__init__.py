"""Robustness certificates: radii within which a prediction provably cannot change."""

from atoll.certify.centroids import NearestCentroid
from atoll.certify.certificate import Certificate, Certifier, Proof
from atoll.certify.evaluate import broken_certificates, certifier_for, heuristic_certifier
from atoll.certify.gloro import GloRo
from atoll.certify.lipschitz import Lipschitz, lipschitz
from atoll.certify.norms import conv_norm, dense_norm
from atoll.certify.power import LipschitzEstimator
from atoll.certify.prototype_attack import PrototypeAttack
from atoll.certify.smoothing import Smoothed

__all__ = [
    "Certificate",
    "Certifier",
    "GloRo",
    "Lipschitz",
    "LipschitzEstimator",
    "NearestCentroid",
    "Proof",
    "PrototypeAttack",
    "Smoothed",
    "broken_certificates",
    "certifier_for",
    "conv_norm",
    "dense_norm",
    "heuristic_certifier",
    "lipschitz",
]
