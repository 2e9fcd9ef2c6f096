"""Certificates of robustness: radii within which a prediction provably cannot change."""

from atoll.certify.centroids import NearestCentroid
from atoll.certify.certificate import Certificate, Certifier
from atoll.certify.families import Proof, certifier_for
from atoll.certify.gloro import GloRo
from atoll.certify.lipschitz import Lipschitz, lipschitz
from atoll.certify.norms import conv_norm, dense_norm
from atoll.certify.power import LipschitzEstimate
from atoll.certify.prototype_attack import PrototypeAttack
from atoll.certify.smoothing import Smoothed

__all__ = [
    "Certificate",
    "Certifier",
    "GloRo",
    "Lipschitz",
    "LipschitzEstimate",
    "NearestCentroid",
    "Proof",
    "PrototypeAttack",
    "Smoothed",
    "certifier_for",
    "conv_norm",
    "dense_norm",
    "lipschitz",
]
