"""Turn a model from elsewhere into a run, so that every command and the report work on it.

MODEL is an ONNX file, a function or class that builds a module (net.py:build, package.module:Class), a model of timm
(timm:resnet18), a Hugging Face folder (config.json and model.safetensors), or a program of torch.export (.pt2, which
can execute code when it is loaded and needs --trust). KEY=VALUE sets an argument of the data set (data.size=224) or of
the function (model.depth=3).

The adopted model is a function of images in [0, 1]. The options say what the original expects. Atoll first reads all
images, and lists those that cannot be read. Then it measures clean accuracy on up to 500 test images, checks data and
model, and reports what looks wrong with the option that would fix it.

The run contains the graph of the model as data and its weights as safetensors. Opening it needs neither the original
file nor its code.

Examples:
  atoll adopt model.onnx --data photos --out runs/photos data.size=224
  atoll adopt net.py:build --weights weights.safetensors --data CIFAR10 --out runs/mine --mean 0.5 --std 0.25
  atoll adopt timm:resnet18 --weights resnet18.pth --data photos --out runs/resnet18
"""

from __future__ import annotations

import argparse
from typing import Any

from atoll.cli.answers import print_json
from atoll.cli.output import print_lines
from atoll.cli.values import path
from atoll.errors import InputError


def numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers separated by commas, got {text!r}") from None


def indices(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers separated by commas, got {text!r}") from None


def pair(text: str) -> tuple[float, float]:
    values = numbers(text)
    if len(values) != 2:
        raise argparse.ArgumentTypeError(f"expected the lowest and the highest input, as in 0,255, got {text!r}")
    return values[0], values[1]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="the model")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="argument of the data set or the model")
    text = "data set: a name, a folder of classes, a .csv file of paths and labels, or an .npz file"
    parser.add_argument("--data", required=True, metavar="DATA", help=text)
    parser.add_argument("--out", type=path, required=True, metavar="RUN", help="folder of the run")
    parser.add_argument("--weights", type=path, metavar="FILE", help="state dict, for models from code and timm")
    parser.add_argument("--mean", type=numbers, help="mean of each channel, after scaling to --range")
    parser.add_argument("--std", type=numbers, help="standard deviation of each channel")
    parser.add_argument("--range", type=pair, help="lowest and highest input: 0,255 or =-1,1")
    parser.add_argument("--channels", choices=("rgb", "bgr"), default="rgb", help="order of the color channels")
    parser.add_argument(
        "--outputs", choices=("logits", "probabilities"), default="logits", help="what the model returns"
    )
    parser.add_argument("--labels", type=indices, help="for each class of the data, the number of the model's output")
    parser.add_argument("--norm", choices=("linf", "l2", "l1"), default="linf", help="norm of later attacks")
    parser.add_argument("--eps", default="8/255", help="radius of later attacks (default: 8/255)")
    parser.add_argument("--trust", action="store_true", help="load a file that can execute code")


def run(options: argparse.Namespace) -> None:
    from atoll.adopt.adopt import adopt
    from atoll.config import parse_yaml, to_plain
    from atoll.stats import percent_interval

    sections: dict[str, dict[str, Any]] = {"data": {}, "model": {}}
    for override in options.overrides:
        key, equals, value = override.partition("=")
        section, _, name = key.partition(".")
        if not equals or section not in sections or not name:
            raise InputError(f"expected data.KEY=VALUE or model.KEY=VALUE, got {override!r}")
        sections[section][name] = parse_yaml(value, override)
    names = ("mean", "std", "range", "channels", "outputs", "labels")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    adoption = adopt(
        options.model,
        options.data,
        out=options.out,
        conventions=given,
        weights=options.weights,
        model_arguments=sections["model"],
        data_arguments=sections["data"],
        threat={"norm": options.norm, "eps": options.eps},
        trust=options.trust,
    )
    if options.json:
        findings = to_plain(list(adoption.findings))
        answer = {"run": str(options.out), "clean": adoption.accuracy.to_json(), "findings": findings}
        print_json("adopt", {**answer, "notes": list(adoption.notes)})
        return
    images = adoption.images
    print_lines(f"{images['training']:,} training and {images['test']:,} test images, all readable", *adoption.notes)
    value, interval = percent_interval(adoption.accuracy)
    print_lines(f"clean accuracy on {adoption.accuracy.total} test images: {value} % (95 %: {interval})")
    print_lines(*map(str, adoption.findings), style="yellow")
    print_lines(f"the run is in {options.out}; next: atoll attack {options.out} --attacks fast")
