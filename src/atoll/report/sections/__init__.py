"""The tabs of the page, one file each; ``summary`` stands above them."""

from collections.abc import Callable, Sequence

from atoll.report.blocks import Section
from atoll.report.read import Reading
from atoll.report.sections import attacks, certificates, curvature, explanation, recipe, reproduce, training

SECTIONS: tuple[Callable[[Sequence[Reading]], Section], ...] = (
    training.section,
    attacks.section,
    certificates.section,
    curvature.section,
    explanation.section,
    recipe.section,
    reproduce.section,
)
