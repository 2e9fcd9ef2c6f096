"""Run by torchrun in test_evaluate.py: an evaluation whose points are shared out."""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from atoll.attacks.evaluate import evaluate
from atoll.distributed import is_main, process_group
from attack_cases import images, quick

if __name__ == "__main__":
    model, split = images()
    out = Path(sys.argv[1])
    with process_group():
        result = evaluate(model, split, quick(), cascade=True, batch_size=8, folder=out / "evaluation")
        in_memory = evaluate(model, split, quick(), cascade=True, batch_size=8, keep=True)
    if is_main():
        counts = torch.tensor([[a.attacked, a.broken, a.forward, a.backward] for a in result.attacks])
        tensors = {"broken_by": result.broken_by, "adversarial": result.adversarial, "counts": counts}
        tensors["distance"] = result.distance
        save_file({**tensors, "in_memory": in_memory.adversarial}, out / "evaluation.safetensors")
