"""The pretend accelerator refuses what a GPU refuses, counts what it should, and leaves the process unchanged."""

import copy
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pretend import DEVICE, PretendTensor, accelerator


def ones(*shape, **options):
    return torch.ones(shape, device=DEVICE, **options)


REFUSED = {
    "sum of two devices": lambda: ones(3) + torch.ones(3),
    "matrix on the CPU": lambda: ones(2, 2) @ torch.ones(2, 2),
    "concatenation": lambda: torch.cat([ones(2), torch.ones(2)]),
    "stack with a number": lambda: torch.stack([ones(), torch.ones(())]),
    "indices of gather": lambda: ones(2, 2).gather(1, torch.zeros(2, 1, dtype=torch.int64)),
    "indexing of a CPU tensor": lambda: torch.ones(3)[ones(3, dtype=torch.int64)],
    "result on the CPU": lambda: torch.ones(3).add_(ones(3)),
    "weights on the CPU": lambda: nn.Linear(3, 2)(ones(1, 3)),
    "inputs on the CPU": lambda: nn.Linear(3, 2).to(DEVICE)(torch.ones(1, 3)),
    "labels on the CPU": lambda: F.cross_entropy(ones(2, 3), torch.tensor([0, 1])),
    "generator on the CPU": lambda: torch.rand(3, generator=torch.Generator(), device=DEVICE),
    "generator on the device": lambda: torch.rand(3, generator=torch.Generator(DEVICE)),
}
ALLOWED = {
    "number": lambda: ones(3) * 2,
    "number on the CPU": lambda: ones(3) * torch.tensor(2.0),
    "indices on the CPU": lambda: ones(3)[torch.tensor([0, 2])],
    "copy to the device": lambda: ones(3).copy_(torch.ones(3)),
    "generator": lambda: torch.rand(3, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE),
    "from a list": lambda: torch.tensor([1.0, 2.0], device=DEVICE),
    "from a list, like another": lambda: ones(3).new_tensor([1.0, 2.0]),
    "like another": lambda: torch.zeros_like(torch.ones(3), device="privateuseone:0"),
}
WAITS = {
    "number": (lambda x: float(x.sum()), 1),
    "condition": (lambda x: bool((x > 0).all()), 1),
    "list": (lambda x: x.tolist(), 1),
    "nonzero": (lambda x: x.nonzero(), 1),
    "selection by a mask": (lambda x: x[x > 0], 1),
    "assignment by a mask": (lambda x: x.__setitem__(x > 0, 2 * x), 1),
    "number by a mask": (lambda x: x.__setitem__(x > 0, 1.0), 0),
    "selection by indices": (lambda x: x[torch.arange(2, device=DEVICE)], 0),
    "selection by indices on the CPU": (lambda x: x[torch.arange(2)], 1),
    "to the CPU": (lambda x: x.cpu(), 1),
    "to the device": (lambda x: torch.ones(3).to(x.device), 1),
    "to the device without waiting": (lambda x: torch.ones(3).to(x.device, non_blocking=True), 0),
    "same device": (lambda x: x.to(DEVICE), 0),
    "from a list": (lambda x: torch.tensor([1.0], device=x.device), 1),
    "arithmetic": (lambda x: (2 * x - 1).clamp(0, 1).sort(), 0),
    "gradient": (lambda x: torch.autograd.grad(x.requires_grad_().square().sum(), x), 0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_a_gpu_refuses(name):
    with accelerator(), pytest.raises(RuntimeError):
        REFUSED[name]()


@pytest.mark.parametrize("name", ALLOWED)
def test_allows_what_a_gpu_allows(name):
    with accelerator():
        assert ALLOWED[name]().device == DEVICE


@pytest.mark.parametrize("name", WAITS)
def test_counts_waits(name):
    task, waits = WAITS[name]
    with accelerator() as counts:
        x = ones(3)
        before = counts.waits
        task(x)
        assert counts.waits - before == waits


def test_counts_operations_but_no_views():
    with accelerator() as counts:
        x = ones(2, 3)
        x.view(-1)[1:].unsqueeze(0).T.detach()
        torch.empty_like(x)
        assert counts.operations == 1
        (x + 1).mul_(2)
        assert counts.operations == 3


def test_tensors_stay_on_the_cpu_unless_they_are_moved():
    with accelerator() as counts:
        assert (torch.ones(3) + torch.tensor([1.0, 2.0, 3.0])).device.type == "cpu"
        assert counts.operations == 0
        assert type(ones(3).cpu()) is torch.Tensor
        with pytest.raises(TypeError):
            ones(3).numpy()


def test_views_share_memory():
    with accelerator():
        x = ones(2, 3)
        x.view(-1)[1:3].mul_(2)
        x[1] += 1
        x[0][0] = 5
        other = ones(3)
        other.data = x[0]
        assert x.tolist() == [[5, 2, 2], [2, 2, 2]]
        assert other.tolist() == [5, 2, 2]
        other[[0, -1]] /= 2
        assert other.tolist() == [2.5, 2, 1]


def test_modules_train_as_on_the_cpu():
    """With copies, optimizers and gradients."""
    results = []
    for device in ("cpu", DEVICE):
        with accelerator():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
            model = copy.deepcopy(model.to(device))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            x, y = torch.randn(6, 4).to(device), (torch.arange(6) % 3).to(device)
            for _ in range(3):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            assert all(isinstance(value, PretendTensor) == (device == DEVICE) for value in model.state_dict().values())
            results.append({name: value.cpu() for name, value in model.state_dict().items()})
    cpu, pretend = results
    assert all(torch.equal(value, pretend[name]) for name, value in cpu.items())


def test_mixed_precision():
    with accelerator():
        layer, x = nn.Linear(3, 2).to(DEVICE), ones(4, 3)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            logits = layer(x)
            assert logits.dtype == torch.bfloat16
            assert logits.softmax(1).dtype == torch.float32
            with torch.autocast(DEVICE.type, enabled=False):
                assert layer(x).dtype == torch.float32
        logits.float().sum().backward()
        assert layer.weight.grad.dtype == torch.float32
        assert layer(x).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert nn.Linear(3, 2)(torch.ones(1, 3)).dtype == torch.bfloat16


def test_forked_processes_compute_gradients_afterwards():
    with accelerator():
        ones(3).requires_grad_().square().sum().backward()
    child = os.fork()
    if not child:
        x = torch.ones(3, requires_grad=True)
        x.square().sum().backward()
        os._exit(int(x.grad.sum()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6


def test_graphs_are_captured_as_before():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.ones(5, 3)
    before = str(torch.export.export(model, (x,)).graph)
    with accelerator():
        model(x)
    assert str(torch.export.export(model, (x,)).graph) == before
    assert not torch.accelerator.is_available()
