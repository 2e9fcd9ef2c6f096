"""One network that enters by four routes gets the same evaluation, certificates and attributions."""

import pytest
import torch
from safetensors.torch import save_file

from atoll.adopt.adopt import adopt
from atoll.certify import certifier_for
from atoll.runs.run import open_run

CODE = """
from atoll.models import SmallConvNet

def build():
    return SmallConvNet((1, 8, 8), 10, **{options})
"""
ROUTES = ["onnx", pytest.param("export", marks=pytest.mark.slow), pytest.param("python", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def run(gloro_run):
    """The run of a certified network that Atoll trained."""
    return open_run(gloro_run.folder)


@pytest.fixture(scope="module")
def adopt_by(run, tmp_path_factory):
    """A function that adopts the network of the run by a route."""
    folder = tmp_path_factory.mktemp("routes")

    def adopted(route):
        model = run.model()
        arguments = {"data": "Digits", "out": folder / route, "threat": {"norm": "l2", "eps": run.threat.eps}}
        if route == "onnx":
            run.export(folder / "net.onnx", certify=False, points=20)
            return adopt(str(folder / "net.onnx"), **arguments).run
        if route == "export":
            batch = torch.export.Dim("batch", min=1)
            program = torch.export.export(model, (torch.rand(2, 1, 8, 8),), dynamic_shapes=({0: batch},))
            torch.export.save(program, folder / "net.pt2")
            return adopt(str(folder / "net.pt2"), trust=True, **arguments).run
        save_file(model.state_dict(), folder / "net.safetensors")
        (folder / "net.py").write_text(CODE.format(options=run.recipe["model"]["init_args"]))
        return adopt(f"{folder}/net.py:build", weights=folder / "net.safetensors", **arguments).run

    return adopted


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_leads_to_the_same_numbers(run, adopt_by, route):
    other = adopt_by(route)
    x, _ = run.data.tensors("test", 60)

    attacked = [each.attack("PGD-10,APGD-DLR", points=60) for each in (run, other)]
    assert attacked[0].clean == attacked[1].clean
    assert [attack.broken for attack in attacked[0].attacks] == [attack.broken for attack in attacked[1].attacks]
    assert 0 < attacked[0].robust.value < attacked[0].clean.value

    # In float64, both networks differ only by the order of operations.
    certificates = [certifier_for(each.model().double(), shape=(1, 8, 8))(x.double()) for each in (run, other)]
    assert torch.equal(certificates[0].prediction, certificates[1].prediction)
    assert (certificates[0].radius > 0.1).any()
    torch.testing.assert_close(certificates[0].radius, certificates[1].radius, rtol=1e-5, atol=1e-6)

    explained = [each.explain(points=4, methods=("SM", "IG", "BIG"), checks=0, budget=60) for each in (run, other)]
    maps = [result.tensors() for result in explained]
    assert maps[0].keys() == maps[1].keys()
    for name, values in maps[0].items():
        torch.testing.assert_close(values, maps[1][name], rtol=1e-3, atol=1e-4 * float(values.abs().nan_to_num().max()))
