"""The fifteen common corruptions of ImageNet-C for images in [0, 1], with five severities each."""

from atoll.corruptions.base import COMMON, CORRUPTIONS, SEVERITIES, Corruption, corrupt
from atoll.corruptions.blur import DefocusBlur, GlassBlur, MotionBlur, ZoomBlur
from atoll.corruptions.digital import Contrast, ElasticTransform, JPEGCompression, Pixelate
from atoll.corruptions.noise import GaussianNoise, ImpulseNoise, ShotNoise
from atoll.corruptions.weather import Brightness, Fog, Frost, Snow

__all__ = [
    "COMMON", "CORRUPTIONS", "SEVERITIES", "Brightness", "Contrast", "Corruption", "DefocusBlur", "ElasticTransform",
    "Fog", "Frost", "GaussianNoise", "GlassBlur", "ImpulseNoise", "JPEGCompression", "MotionBlur", "Pixelate",
    "ShotNoise", "Snow", "ZoomBlur", "corrupt",
]  # fmt: skip
