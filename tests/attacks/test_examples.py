"""The examples of an attack: the same points for every model, and answers that agree with the evaluation."""

import torch
from safetensors.torch import load_file

from atoll.attacks.examples import EXAMPLES, choose_examples
from atoll.attacks.measure import AttackSettings
from atoll.measure import load_result, measure
from atoll.subject import Subject
from atoll.threat import ThreatModel
from attack_cases import template_model
from support import TinyData

DATA = TinyData(validation=1 / 6)


def attacked(folder, model, eps, attacks="PGD-3,APGD-CE"):
    subject = Subject(model, DATA, ThreatModel("linf", eps))
    result = measure(subject, AttackSettings(attacks=attacks, points=24), folder)
    return (
        result,
        load_file(result.folder / "examples.safetensors"),
        load_file(result.folder / "adversarial.safetensors"),
    )


def test_classes_take_turns():
    labels = torch.tensor([5] * 30 + [2] * 2 + [9])
    assert choose_examples(labels, 5).tolist() == [0, 30, 32, 1, 31]
    assert choose_examples(labels[:3], 8).tolist() == [0, 1, 2]


def test_images_and_answers_are_those_of_the_evaluation(tmp_path):
    seen = set()
    for place, (eps, noise) in enumerate((("0.05", 0.0), ("0.18", 0.1), ("0.4", 0.3))):
        model = template_model()
        model[1].weight.data += noise * torch.randn(3, 64)
        result, images, stored = attacked(tmp_path / str(place), model, eps)
        assert load_result(result.folder).examples == result.examples
        assert len(result.examples) == EXAMPLES
        assert [e.index for e in result.examples] == choose_examples(DATA.test.labels[:24]).tolist()
        x = DATA.tensors("test", 24)[0]
        before, after = (model(images[name]).argmax(1) for name in ("x", "x_adv"))
        for i, example in enumerate(result.examples):
            assert torch.equal(images["x"][i], x[example.index])
            label = int(stored["label"][example.index])
            names = [str(DATA.classes[k]) for k in (label, int(before[i]), int(after[i]))]
            assert [example.label, example.before, example.after] == names
            broken_by = int(stored["broken_by"][example.index])
            change = (images["x_adv"][i] - images["x"][i]).abs().max()
            assert change <= float(eps) + 1e-6
            if broken_by >= 0:
                assert torch.equal(images["x_adv"][i], stored["adversarial"][example.index])
                assert example.before == example.label != example.after
            elif broken_by == -1:
                assert change > 0  # what was tried, not the clean image
                assert example.before == example.label == example.after
            else:
                assert change == 0
                assert example.label != example.before == example.after
            seen.add(min(broken_by, 0))
    assert seen == {0, -1, -2}


def test_no_attack_has_no_examples(tmp_path):
    result = measure(
        Subject(template_model(), DATA, ThreatModel("linf", "0.1")), AttackSettings(attacks="none", points=6), tmp_path
    )
    assert result.examples == ()
    assert not (result.folder / "examples.safetensors").exists()
