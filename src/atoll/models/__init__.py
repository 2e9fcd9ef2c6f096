"""Classifiers for inputs in [0, 1], with normalization inside the model, consisting of ``features`` and ``head``."""

from atoll.models.activations import GroupSort, Householder, MinMax
from atoll.models.base import Classifier, InputRange, Normalize
from atoll.models.centroid import CentroidNet, Centroids, EtaLayer
from atoll.models.convnet import ConvNet4C3F, ConvNet6C2F, SmallConvNet
from atoll.models.hybrid import HybridViT
from atoll.models.liresnet import LiResNet
from atoll.models.mlp import MLP
from atoll.models.mobilenet import MobileNetV2
from atoll.models.orthogonal import OrthogonalConv2d, OrthogonalLinear, OrthogonalNet
from atoll.models.preact_resnet import PreActResNet
from atoll.models.pretrained import load_pretrained
from atoll.models.timm_adapter import Timm
from atoll.models.vgg import VGG
from atoll.models.vit import ViT
from atoll.models.wide_resnet import WideResNet

__all__ = [
    "MLP", "VGG", "CentroidNet", "Centroids", "Classifier", "ConvNet4C3F", "ConvNet6C2F", "EtaLayer", "GroupSort",
    "Householder", "HybridViT", "InputRange", "LiResNet", "MinMax", "MobileNetV2", "Normalize", "OrthogonalConv2d",
    "OrthogonalLinear", "OrthogonalNet", "PreActResNet", "SmallConvNet", "Timm", "ViT", "WideResNet", "load_pretrained",
]  # fmt: skip
