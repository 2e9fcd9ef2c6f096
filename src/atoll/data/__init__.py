"""Data sets, the path from storage to a batch, and augmentations."""

from atoll.data.archive import unpack
from atoll.data.augment import Augmentation, Brightness, Cutout, HorizontalFlip, RandomCrop
from atoll.data.base import (
    Batch,
    ConcatSplit,
    Data,
    MemorySplit,
    Split,
    Splits,
    SubSplit,
    batches,
    in_order,
    shuffled,
    to_float,
)
from atoll.data.cifar import CIFAR10, CIFAR100
from atoll.data.digits import Digits
from atoll.data.folder import ImageFolder
from atoll.data.mix import cutmix, cutmix_boxes, mixup
from atoll.data.mnist import KMNIST, MNIST, FashionMNIST
from atoll.data.moons import TwoMoons
from atoll.data.npz import Npz
from atoll.data.randaugment import RandAugment
from atoll.data.svhn import SVHN
from atoll.data.tiny_imagenet import TinyImageNet, tiny_imagenet_boxes

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "KMNIST",
    "MNIST",
    "SVHN",
    "Augmentation",
    "Batch",
    "Brightness",
    "ConcatSplit",
    "Cutout",
    "Data",
    "Digits",
    "FashionMNIST",
    "HorizontalFlip",
    "ImageFolder",
    "MemorySplit",
    "Npz",
    "RandAugment",
    "RandomCrop",
    "Split",
    "Splits",
    "SubSplit",
    "TinyImageNet",
    "TwoMoons",
    "batches",
    "cutmix",
    "cutmix_boxes",
    "in_order",
    "mixup",
    "shuffled",
    "tiny_imagenet_boxes",
    "to_float",
    "unpack",
]
