"""The one glossary: what the page explains on hover and on tap, and what ``docs/style.md`` prints."""

from __future__ import annotations

import re
from functools import cache

# Terms by section.  Terms that share a meaning are separated by commas.
GLOSSARY: dict[str, dict[str, str]] = {
    "Robustness": {
        "threat model": "the perturbations an attacker may use: a norm (linf, l2, l1 or l0), a radius eps, and the"
        " valid range of inputs",
        "eps": "radius of the allowed perturbation, in input units; inputs are in [0, 1], so 8/255 is eight gray"
        " levels",
        "linf": "the largest change of any single value; at linf 0.1 every pixel may change by 0.1",
        "l2": "the Euclidean length of a change: the root of the sum of squares over all pixels",
        "l1": "the sum of the absolute changes of all pixels",
        "l0": "the number of components (channels of pixels) that change",
        "clean accuracy": "share of unperturbed points that are classified correctly",
        "robust accuracy": "share of points that stay correct under attack; an upper bound, because a stronger attack"
        " may find more",
        "at most": "an upper bound: the share of points that no attack broke",
        "worst case": "a point counts as correct only if none of the attacks breaks it",
        "verified accuracy, VRA": "verified robust accuracy: share of points that are correct and provably cannot"
        " change within eps; a lower bound",
        "certificate": "a predicted class and an l2 radius within which the prediction cannot change",
        "certified accuracy": "share of points that are correct and have a certificate of at least the given radius",
        "certified radius": "the l2 radius within which the prediction of a point provably cannot change",
        "probabilistic certificate": "a certificate of randomized smoothing, which is false with probability at most"
        " alpha",
        "randomized smoothing": "certifies the class that a network predicts most often when Gaussian noise is added to"
        " the input",
        "abstain": "to return no class, because the prediction is not certified at the requested radius",
        "Lipschitz constant": "the largest factor by which a function can stretch a distance; it bounds how fast logits"
        " change",
        "Lipschitz bound": "a proven upper bound on the Lipschitz constant; the smaller it is, the larger the certified"
        " radii",
        "GloRo Net, GloRo": "a network trained for certification with a global Lipschitz bound (globally robust)",
        "Centroid Net": "a network that predicts the class of the nearest centroid, with exact geometric certificates",
        "eta layer": "rejects inputs of a Centroid Net that are not clearly closer to one class; eta sets how clearly",
        "gradient masking": "gradients that mislead attacks, so that robust accuracy comes out too high",
        "power": "share of planted adversarial inputs that the attacks find, on a second classifier with the same"
        " features; if it is low, robust accuracy comes out too high",
        "AutoAttack": "an ensemble of APGD-CE, APGD-T, FAB-T and Square, the usual standard for robust accuracy",
        "fast attack suite": "quick attacks on all points, and AutoAttack on a random sample of the points that"
        " remain: an estimate with an interval",
        "FGSM": "fast gradient sign method: an attack of one step",
        "PGD": "projected gradient descent: an attack of many small gradient steps; PGD-20 takes 20",
        "CW": "PGD on the margin between the true class and the closest other one (Carlini and Wagner)",
        "APGD, APGD-CE, APGD-DLR, APGD-T": "PGD with an automatic step size; it maximizes cross-entropy (CE) or a"
        " difference of logits (DLR), or aims at other classes one by one (T)",
        "FAB, FAB-T": "fast adaptive boundary attack: looks for the smallest perturbation that changes the class",
        "FMN, PDPGD, SigmaZero": "attacks that look for the smallest perturbation that changes the class: FMN in linf,"
        " l2 and l1, PDPGD in l1, SigmaZero in l0",
        "Square": "a black-box attack that changes random squares of the image and needs no gradients",
        "ADBD": "average decision boundary distance, measured by RayS",
        "RayS": "an attack that needs only predicted classes and measures the distance to the decision boundary",
        "surrogate": "the model on which a transfer attack crafts its inputs",
        "corruption, common corruption": "noise, blur, weather or a digital artifact: a change of an image that no"
        " attacker chose",
        "severity": "strength of a corruption, from 1 to 5",
        "ImageNet-C": "a benchmark of fifteen common corruptions at five severities",
    },
    "Training": {
        "Standard": "standard training: cross-entropy at clean inputs, without an attack",
        "AT": "adversarial training: cross-entropy at adversarial inputs",
        "TRADES, MART, ALP": "losses that combine clean and adversarial predictions",
        "GloRoCE, GloRoTRADES": "losses of GloRo Nets: inputs that cannot be certified count as an extra class;"
        " GloRoTRADES weighs accuracy and certificates",
        "FixedMarginCE, EMMA, LipschitzMargin": "losses of certified training: cross-entropy with a margin of eps times"
        " the Lipschitz constant; EMMA adapts it to each input",
        "CentroidMargin": "loss of Centroid Nets: asks for a certified radius at every training point",
        "LogitAnnealing": "loss of orthogonal networks: cross-entropy with a margin; points beyond it lose weight",
        "EpsRamp": "increases eps in the course of training",
        "GaussianNoise": "trains on inputs with noise, for randomized smoothing",
        "CentroidsFromData": "starts the centroids of a Centroid Net at features of training points",
        "AWP, AWPT": "adversarial weight perturbation; AWPT perturbs only the top layer",
        "SWA": "stochastic weight averaging",
        "SAM": "sharpness-aware minimization",
        "Lookahead": "averages fast weights into slow ones every few steps",
        "Mixup, CutMix": "train on mixtures of two images and of their labels",
        "EarlyStopping": "ends the training when validation accuracy no longer improves",
        "WCISchedule": "lowers the learning rate while the Weight-Curvature Index is large",
        "S2O": "second-order statistics optimization of the weights",
        "RAT": "randomized adversarial training with a Taylor expansion in the weights",
        "TrH": "regularization by the trace of the Hessian",
        "recipe, grid, variant": "a recipe defines a run; a grid is a family of recipes; a variant is one member of it",
        "run": "a folder with a recipe, checkpoints, metrics and results",
        "cell": "one run of a study",
        "checkpoint": "the weights saved after an epoch; the best one has the highest validation accuracy, the last one"
        " ends the training",
    },
    "Curvature": {
        "Hessian": "the matrix of the second derivatives of the loss with respect to the weights",
        "Hessian trace": "sum of the eigenvalues of the Hessian; small in flat minima",
        "eigenvalue": "curvature of the loss along one direction in the space of the weights; large values mean sharp"
        " minima",
        "WCI, Weight-Curvature Index": "sum over layers of the root of squared weight norm times Hessian trace; does"
        " not change when layers are rescaled",
        "loss landscape": "the loss when the weights (or the input) move along two directions",
        "robust generalization gap, robust gap": "robust error on test points minus robust error on training points",
        "PAC-Bayes bound": "an upper bound on the expected error of randomly perturbed weights",
        "linear bound, Catoni bound, kl-inverse bound, square-root bound": "forms of a PAC-Bayes bound: ways to combine"
        " the loss of the perturbed weights with the KL divergence",
        "posterior": "the distribution of the randomly perturbed weights in a PAC-Bayes bound",
        "KL": "Kullback-Leibler divergence: how far two distributions are apart",
        "vacuous": "said of a bound that is larger than the largest possible error",
        "probe": "a random vector that a trace is estimated with; more probes give smaller errors",
    },
    "Explanations": {
        "attribution": "a number for every input pixel: how much it contributes to the explained class",
        "decision boundary": "the inputs at which the predicted class changes",
        "SM": "saliency map: the gradient of the logit with respect to the input",
        "IxG": "input times gradient",
        "IG": "integrated gradients: gradients averaged along the path from a baseline, times the difference from it",
        "SG": "SmoothGrad: gradients averaged over noisy copies of the input",
        "BSM": "boundary saliency map: the gradient at the closest point of the decision boundary",
        "BIG": "boundary integrated gradients: IG with the closest point of the decision boundary as the baseline",
        "BNM": "boundary normal map: the gradient of the margin at the closest point of the decision boundary",
        "infidelity": "how badly an attribution predicts the effect of random perturbations on the logit; lower is"
        " better",
        "completeness gap": "difference between the sum of an attribution and the change of the logit that it"
        " should explain",
        "sanity check": "tests whether an attribution changes when the layers of the model are randomized, as"
        " it should",
        "local sensitivity": "how fast an attribution changes around an input",
        "locality": "precision, recall and F1 of an attribution with respect to the bounding box of the object",
    },
}
# Words of everyday language; to mark them all over a page would help nobody.
UNMARKED = ("recipe", "grid", "variant", "run", "cell")

MEANINGS = {
    term: meaning for section in GLOSSARY.values() for terms, meaning in section.items() for term in terms.split(", ")
}


def find_terms(text: str) -> list[tuple[str, str]]:
    """A text in pieces, each with the glossary's term for it; empty for what is between the terms.

    >>> find_terms("Infidelity, SM")
    [('Infidelity', 'infidelity'), (', ', ''), ('SM', 'SM')]
    >>> find_terms("SMALL certificates")
    [('SMALL ', ''), ('certificates', 'certificate')]
    """
    pieces, end = [], 0
    for match in _pattern().finditer(text):
        term = match[1] if match[1] in MEANINGS else match[1][0].lower() + match[1][1:]
        pieces += [(text[end : match.start()], "")] if match.start() > end else []
        pieces.append((match[0], term))
        end = match.end()
    return [*pieces, (text[end:], "")] if end < len(text) else pieces


@cache
def _pattern() -> re.Pattern[str]:
    """Terms as whole words, the longest first; common words also at the beginning of a sentence, and in the plural."""
    terms = sorted(MEANINGS.keys() - set(UNMARKED), key=len, reverse=True)
    forms = [f"[{term[0]}{term[0].upper()}]{re.escape(term[1:])}" if term[0].islower() else term for term in terms]
    return re.compile(rf"(?<!\w)({'|'.join(forms)})(?:e?s)?(?!\w)")
