"""Certified accuracy against the radius, and what the certificates rest on."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.report.blocks import Alarm, Block, Cell, Fold, Plot, Section, Table, Title, Words
from atoll.report.figures import chart, curve, percent_axis
from atoll.report.read import Kept, Reading
from atoll.report.sections.shared import about, alarms, each, interval, is_probable, lacking
from atoll.report.values import accuracy, count, digits, entries, get, number, plain


def section(runs: Sequence[Reading]) -> Section:
    missing = lacking(runs, "certificates", "smoothing")
    blocks = [*alarms(runs, "certificates"), *missing, *_curves(runs), *each(runs, _results)]
    return Section("certificates", "Certificates", blocks)


def _curves(runs: Sequence[Reading]) -> list[Block]:
    traces = []
    for run in runs:
        for kept in run.certifications:
            radii, shares = (entries(kept.tree, "curve", name) for name in ("radius", "verified"))
            pairs = zip(map(number, radii), map(number, shares), strict=False)
            points = [(r, 100 * share) for r, share in pairs if r is not None and share is not None]
            name = f"{run.name} (probable)" if is_probable(kept) else f"{run.name} (proven)"
            if points:
                dash = "dash" if is_probable(kept) else "solid"
                # Between two radii at least what holds at the larger one is certified.
                traces.append(curve(name, points, run.number, dash=dash, shape="vh", unit=" %"))
    if not traces:
        return []
    figure = chart(traces, "radius (l2)", "%", yaxis=percent_axis("certified accuracy in %"), height=400)
    note = "Solid: proven. Dashed: by randomized smoothing, which holds for each point with a probability, not surely."
    return [Plot("certificates-curve", "Certified accuracy", figure, note)]


def _results(run: Reading) -> list[Block]:
    blocks: list[Block] = []
    for kept in run.certifications:
        tree = kept.tree
        kind = "Probable certificates (randomized smoothing)" if is_probable(kept) else "Proven certificates"
        blocks.append(Title(kind, f"{about(tree)}, {plain(get(tree, 'precision'))}"))
        if is_probable(kept):
            blocks.append(Alarm("certificates", "probable, not proven", _smoothing(tree), run.number))
        rows: list[list[str | Cell]] = [_row("clean", "–", get(tree, "clean"))]
        words = "verified, probably" if is_probable(kept) else "verified"
        rows += [_row(words, digits(get(one, "eps")), one) for one in entries(tree, "verified")]
        for one in entries(tree, "empirical"):
            rows.append(_row(f"under {plain(get(one, 'attacks'))}", digits(get(one, "eps")), one))
        blocks.append(Table(["", "radius (l2)", "accuracy", "95 %"], rows))
        if shares := entries(tree, "rejected"):
            lines = [_row(plain(get(one, "data")), digits(get(one, "eps")), one) for one in shares]
            blocks.append(Table(["rejected of", "radius (l2)", "share", "95 %"], lines))
        blocks.append(Words([f"Median certified radius {digits(get(tree, 'median_radius'))}.", *_check(kept)]))
        if layers := [one for one in entries(tree, "layers") if get(one, "how") != "known"]:
            table = [_layer(one) for one in layers]
            columns = ["layer", "kind", "Lipschitz, at most", "proof"]
            blocks.append(Fold("What the proofs rest on: Lipschitz constants of the layers", [Table(columns, table)]))
    return blocks


def _row(name: str, eps: str, tree: object) -> list[str | Cell]:
    found = accuracy(tree)
    value = "–" if found is None else f"{100 * found.value:.2f} %"
    return [name, eps, value, interval(found)]


def _layer(tree: object) -> list[str | Cell]:
    name, kind, how = (plain(get(tree, part)) for part in ("name", "kind", "how"))
    return [name, kind, digits(get(tree, "lipschitz")), how]


def _smoothing(tree: object) -> str:
    sigma, alpha, samples = (get(tree, "smoothing", name) for name in ("sigma", "alpha", "n"))
    return (
        f"each of these certificates is false with a probability of up to {plain(alpha)}; they are about the smoothed"
        f" classifier (Gaussian noise of {plain(sigma)}, {count(samples)} samples a point), not about the network alone"
    )


def _check(kept: Kept) -> list[str]:
    if is_probable(kept):
        return []
    check = get(kept.tree, "check")
    if check is None:
        return ["These certificates were not attacked (--no-attack)."]
    attacked, certified = count(get(check, "attacked")), count(get(check, "certified"))
    return [f"{attacked} of {certified} certified points were attacked at their radius: none fell."]
