"""A stage alone on several tokens, for backends whose kernels run one at a time."""

from collections.abc import Callable, Mapping

import torch

Tensors = dict[str, torch.Tensor]


def run_by_token(stage: str, state: Mapping[str, torch.Tensor], run: Callable[[Tensors], Tensors]) -> Tensors:
    """What `run` makes of each token's tensors, put together again: any stage but attention.

    `run` takes and gives tensors without their token axis, on the CPU; what it takes is float32.
    """
    axes = {name: 0 if tensor.dim() == 1 else 1 for name, tensor in state.items()}
    tokens = [tensor.detach().cpu().float().unbind(axes[name]) for name, tensor in state.items()]
    parts = [run(dict(zip(state, token, strict=True))) for token in zip(*tokens, strict=True)]
    axis = 0 if stage == "lm_head" else 1
    return {name: torch.stack([part[name] for part in parts], axis) for name in parts[0]}
