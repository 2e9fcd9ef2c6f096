"""The fifteen common corruptions of ImageNet-C for images in [0, 1], with five severities each."""

from atoll.corruptions.base import COMMON, CORRUPTIONS, SEVERITIES, Corruption, corrupt
from atoll.corruptions.blur import DefocusBlur, GlassBlur, MotionBlur, ZoomBlur
from atoll.corruptions.digital import Contrast, ElasticTransform, JPEGCompression, Pixelate
from atoll.corruptions.noise import AddedGaussianNoise, ImpulseNoise, ShotNoise
from atoll.corruptions.weather import AddedBrightness, Fog, Frost, Snow

__all__ = [
    "COMMON", "CORRUPTIONS", "SEVERITIES", "AddedBrightness", "AddedGaussianNoise", "Contrast", "Corruption",
    "DefocusBlur", "ElasticTransform", "Fog", "Frost", "GlassBlur", "ImpulseNoise", "JPEGCompression", "MotionBlur",
    "Pixelate", "ShotNoise", "Snow", "ZoomBlur", "corrupt",
]  # fmt: skip
