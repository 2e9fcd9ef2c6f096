"""Data sets, data loading and augmentations."""

from atoll.data.archive import unpack
from atoll.data.augment import Augmentation, Brightness, Cutout, Elastic, HorizontalFlip, RandomAffine, RandomCrop
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
from atoll.data.boxes import boxes_of
from atoll.data.canvas import ClutteredCanvas
from atoll.data.cifar import CIFAR10, CIFAR100
from atoll.data.fashion_mnist_small import FashionMNISTSmall
from atoll.data.fewer_classes import FewerClasses
from atoll.data.folder import ImageFolder
from atoll.data.image_csv import ImageCsv
from atoll.data.mix import cutmix, cutmix_boxes, mixup
from atoll.data.mnist import KMNIST, MNIST, FashionMNIST
from atoll.data.npz import Npz
from atoll.data.pets import OxfordPets
from atoll.data.randaugment import RandAugment
from atoll.data.svhn import SVHN
from atoll.data.tiny_imagenet import TinyImageNet
from atoll.data.toy import Digits, TwoMoons

__all__ = [
    "CIFAR10", "CIFAR100", "KMNIST", "MNIST", "SVHN", "Augmentation", "Batch", "Brightness", "ClutteredCanvas",
    "ConcatSplit", "Cutout", "Data", "Digits", "Elastic", "FashionMNIST", "FashionMNISTSmall", "FewerClasses",
    "HorizontalFlip", "ImageCsv", "ImageFolder", "MemorySplit", "Npz", "OxfordPets", "RandAugment", "RandomAffine",
    "RandomCrop", "Split", "Splits", "SubSplit", "TinyImageNet", "TwoMoons", "batches", "boxes_of", "cutmix",
    "cutmix_boxes", "in_order", "mixup", "shuffled", "to_float", "unpack",
]  # fmt: skip
