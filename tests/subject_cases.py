"""A subject without a run, and what the tests of all measurements share."""

import copy
import json
from functools import cache

import torch
from hypothesis import strategies as st

from atoll.losses import AT
from atoll.measure import Context, measurement, result_digest, split_digest
from atoll.stats import Estimate
from atoll.subject import Origin, Subject, SubjectRecord
from atoll.threat import ThreatModel
from support import TinyData, tiny_model

numbers = st.floats(-1e6, 1e6)
texts = st.text(max_size=8)
estimates = st.builds(Estimate, numbers, st.floats(0, 1e6), st.booleans())
records = st.builds(
    SubjectRecord,
    texts,
    texts,
    texts,
    texts,
    st.builds(Origin, texts, st.none() | st.integers(0, 2**62), st.none(), texts),
)


@cache
def _tiny_subject():
    model = tiny_model().eval()
    with torch.no_grad():
        model.head.weight *= 20
        model.head.bias -= model(TinyData().tensors("train")[0]).mean(0)  # so that its predictions differ
    return Subject(model, TinyData(validation=1 / 6), ThreatModel("linf", 0.1))


def tiny_subject(loss=None, data=None):
    """An untrained net with small images of three classes."""
    shared = _tiny_subject()
    subject = Subject(copy.deepcopy(shared.model), data or shared.data, shared.threat, loss or AT())
    subject.__dict__["digest"] = shared.digest  # capturing the model takes a second
    return subject


def digest_of(subject, settings):
    """What the result of a measurement is stored under."""
    method, settings = measurement(settings.kind), settings.resolve(subject)
    inputs = split_digest(method.inputs(subject, settings))
    others = method.depends_on(subject, settings, Context())
    return result_digest(method.result, subject, inputs, settings, others)


def read_back(result):
    """A result after a trip through JSON."""
    return type(result).from_json(json.loads(json.dumps(result.to_json())))


def stored_files(folder):
    """The content of all files below a folder; times and dates in results are left out."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    for name, content in files.items():
        if name.endswith("result.json"):
            tree = json.loads(content)
            files[name] = tree | {"seconds": 0, "checksum": "", "environment": tree["environment"] | {"date": ""}}
    return files


class OtherPixels(TinyData):
    """The same labels, but one pixel of every image of a split is different."""

    def __init__(self, changed, **options):
        super().__init__(**options)
        self.changed = changed

    def load(self):
        splits = super().load()
        getattr(splits, self.changed).images[:, 0, 0, 0] ^= 1
        return splits
