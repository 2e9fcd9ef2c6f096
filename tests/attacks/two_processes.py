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
        found = evaluate(model, split, quick(), cascade=True, batch_size=8, folder=out / "evaluation")
        kept = evaluate(model, split, quick(), cascade=True, batch_size=8, keep=True)
    if is_main():
        counts = torch.tensor([[a.attacked, a.broken, a.forward, a.backward] for a in found.attacks])
        tensors = {"broken_by": found.broken_by, "adversarial": found.adversarial, "counts": counts}
        save_file({**tensors, "kept": kept.adversarial}, out / "found.safetensors")
