"""Classifiers as ONNX files that describe their classes and inputs, and agree with the original."""

from atoll.export.metadata import Metadata
from atoll.export.model import Exported, export_model

__all__ = ["Exported", "Metadata", "export_model"]
