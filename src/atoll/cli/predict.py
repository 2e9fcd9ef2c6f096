"""Predict the classes of image files with a trained model.

Images are decoded like the images of the run's data set: photos are scaled and cropped if its own images are, otherwise
they must have the right size. The data set itself need not be there.

For a run that was trained for certification, each prediction has a certified l2 radius within which it cannot change.
The model abstains if this radius is smaller than eps.

Examples:
  atoll predict runs/digits-at seven.png
  atoll predict runs/photos holiday/ garden/cat.jpg --top 5
  atoll predict runs/digits-gloro seven.png --eps 0.3 --json
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from atoll.cli.answers import print_json
from atoll.cli.measure import add_run_flags, parse_checkpoint, warn_about_selection
from atoll.cli.output import print_table
from atoll.cli.values import path, whole_number

if TYPE_CHECKING:
    from atoll.runs.predict import Prediction


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=path, metavar="RUN", help="folder of a run")
    parser.add_argument("images", nargs="+", type=path, metavar="IMAGE", help="image file, or folder of images")
    parser.add_argument(
        "--top", type=whole_number, default=3, metavar="K", help="show the K most probable classes (default: 3)"
    )
    parser.add_argument(
        "--eps", metavar="X", help="l2 radius below which a certified model abstains (default: as trained)"
    )
    add_run_flags(parser)


def run(options: argparse.Namespace) -> None:
    from atoll.config import to_plain
    from atoll.runs.run import open_run

    checkpoint = parse_checkpoint(options.checkpoint)
    opened = open_run(options.run_folder, trust=options.trust, data=dict(options.locations))
    warn_about_selection(opened, checkpoint, options.weights, str(options.run_folder))
    predictions = opened.predict(
        *options.images, top=options.top, eps=options.eps, checkpoint=checkpoint, weights=options.weights
    )
    if options.json:
        print_json("predict", {"run": str(options.run_folder), "predictions": to_plain(predictions)})
    else:
        show(predictions)


def show(predictions: list[Prediction]) -> None:
    certified = any(prediction.radius is not None for prediction in predictions)
    several = any(len(prediction.classes) > 1 for prediction in predictions)
    columns = ["image", "class", "probability %", *(["certified radius (l2)"] if certified else [])]
    rows = []
    for prediction in predictions:
        first, *others = prediction.classes
        row = [prediction.image, first.name, f"{100 * first.probability:.2f}"]
        if prediction.radius is not None:
            row.append(f"abstains ({prediction.radius:.3g})" if prediction.abstains else f"{prediction.radius:.3g}")
        if several:
            row.append(", ".join(f"{each.name} {100 * each.probability:.2f}" for each in others))
        rows.append(row)
    print_table("predictions", [*columns, *(["next classes"] if several else [])], rows)
