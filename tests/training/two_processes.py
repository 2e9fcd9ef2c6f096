"""What test_distributed.py runs on two processes: one step for every loss and a short run for every method."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from atoll.data import batches, in_order
from atoll.distributed import all_sum, process_group, rank, world_size
from atoll.errors import TrainingError
from atoll.training.methods import Method
from support import ANNEALED, CENTROID, CERTIFIED, LOSSES, METHODS, gloo_threads, tiny_trainer, weights


def gradients(loss: str, batch_norm: bool) -> dict[str, torch.Tensor]:
    trainer = tiny_trainer(loss, batch_norm=batch_norm)
    share = 16 // world_size()
    order = [in_order(16, 16)[0][rank() * share : (rank() + 1) * share]]
    trainer.train_step(next(batches(trainer.data.train, order)))
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


def trained(loss: str, methods: tuple[str, ...], batch_norm: bool) -> dict[str, torch.Tensor]:
    # In double precision: training is chaotic, and in float32 the order of a sum shows after a few steps.
    epochs = 2 if {"early-stopping", "wci-schedule"} & set(methods) else 1  # these act between epochs
    trainer = tiny_trainer(loss, methods=methods, batch_norm=batch_norm, epochs=epochs, double=True)
    trainer.fit()
    return weights(trainer.model)


class PoisonOne(Method):
    """A term that is infinite on one process, with finite gradients everywhere."""

    def on_loss(self, trainer, step):
        step.terms["poison"] = torch.full((len(step.y),), torch.inf if rank() == world_size() - 1 else 0.0)


def stopped() -> torch.Tensor:
    """How many processes end the run, and say why."""
    trainer = tiny_trainer()
    trainer.methods = (PoisonOne(),)
    try:
        trainer.train_step(next(batches(trainer.data.train, in_order(16, 16))))
    except TrainingError as error:
        return all_sum(torch.tensor(int("the loss term poison is" in str(error))))
    return torch.tensor(0)


def main(out: Path) -> None:
    torch.set_num_threads(1)
    with process_group():
        results = {}
        for loss in LOSSES | ANNEALED | CERTIFIED | CENTROID:
            for batch_norm in (False, True) if loss == "trades" else (True,):
                results |= {f"gradient/{loss}/{batch_norm}/{k}": v for k, v in gradients(loss, batch_norm).items()}
        for method in METHODS:
            results |= {f"trained/{method}/{k}": v for k, v in trained("trades", (method,), True).items()}
        results["stopped"] = stopped() // world_size()
        trainer = tiny_trainer()
        accuracy = trainer.validate(trainer.data.test, steps=3)
        results |= {f"evaluated/{name}": torch.tensor(a.correct) for name, a in accuracy.items()}
        del trainer  # it refers to the process group
        if rank() == 0:
            save_file(results, out)
    assert not gloo_threads()
