"""AdamW by torch's fused kernel, equal to fairseq's ``adam`` in results and in checkpoints (``--optimizer tupe_adam``)."""

import ast
import math
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, List  # noqa: UP035 (older omegaconf knows no list[float])

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II, OmegaConf

from fairseq_tupe.errors import TupeError

# what fairseq's adam keeps in a group, and so in a checkpoint
GROUP_KEYS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "params")


class ExactFusedAdamW(torch.optim.AdamW):
    """Adam as fairseq, apex and the original TUPE have it: decoupled weight decay, eps beside the uncorrected second moment.

    torch divides by sqrt(v / c) + eps, where c = 1 - beta2^t; with eps / sqrt(c) for eps that is (sqrt(v) + eps) / sqrt(c), the
    form wanted. Its state is fairseq's: ``step``, ``exp_avg``, ``exp_avg_sq``.
    """

    def __init__(self, params, lr: float, betas: tuple, eps: float, weight_decay: float):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        # Python numbers, since torch keeps its counters on the device, where reading one waits for it
        self._updates: dict = defaultdict(int)

    @torch.no_grad()
    def step(self, closure=None):
        """One update; parameters without a gradient are left out and don't age."""
        groups = self.param_groups
        try:
            self.param_groups = [part for group in groups for part in self._parts(group)]
            return super().step(closure)
        finally:
            self.param_groups = groups

    def _parts(self, group: dict) -> list[dict]:
        """The group's parameters by their number of updates (usually all the same), each part with its own eps."""
        by_update = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is not None:
                self._updates[parameter] += 1
                by_update[self._updates[parameter]].append(parameter)
        beta2 = group["betas"][1]
        return [
            {**group, "params": parameters, "eps": group["eps"] / math.sqrt(1 - beta2**update)}
            for update, parameters in by_update.items()
        ]

    def state_dict(self) -> dict:
        """In the format of fairseq's ``adam``: the step is a Python int."""
        packed = super().state_dict()
        state = {key: {**value, "step": int(value["step"])} for key, value in packed["state"].items()}
        groups = [{key: group[key] for key in GROUP_KEYS} for group in packed["param_groups"]]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict) -> None:
        """Takes what :meth:`state_dict` or fairseq's ``adam`` wrote."""
        current = self.param_groups
        super().load_state_dict(state_dict)
        for loaded, ours in zip(self.param_groups, current, strict=True):
            loaded.update({key: value for key, value in ours.items() if key not in GROUP_KEYS})
        self._updates.clear()
        for parameter, state in self.state.items():
            self._updates[parameter] = int(state["step"])
            state["step"] = torch.tensor(float(state["step"]), dtype=torch.float32, device=parameter.device)


@dataclass
class TupeAdamConfig(FairseqDataclass):
    """fairseq's flags of ``adam``, as far as they apply."""

    adam_betas: Any = field(default=(0.9, 0.999), metadata={"help": "decay rates of the two moments"})
    adam_eps: float = field(default=1e-8, metadata={"help": "added to the root of the uncorrected second moment"})
    weight_decay: float = field(default=0.0, metadata={"help": "decoupled weight decay"})
    lr: List[float] = II("optimization.lr")  # noqa: UP006


@register_optimizer("tupe_adam", dataclass=TupeAdamConfig)
class TupeAdam(FairseqOptimizer):
    """``--optimizer tupe_adam``; checkpoints are interchangeable with ``--optimizer adam``."""

    def __init__(self, cfg: TupeAdamConfig, params):
        super().__init__(cfg)
        params = list(params)
        wrong = {str(p.dtype) for p in params if isinstance(p, torch.Tensor) and p.dtype != torch.float32}
        if wrong:
            raise TupeError(
                f"--optimizer tupe_adam updates float32 parameters, got {', '.join(sorted(wrong))}: use --optimizer adam"
            )
        self._optimizer = ExactFusedAdamW(params, **self.optimizer_config)

    @property
    def optimizer_config(self) -> dict:
        """Settings that win over those in a checkpoint."""
        lr, betas = self.cfg.lr, self.cfg.adam_betas
        if isinstance(betas, str):
            betas = ast.literal_eval(betas)
        elif OmegaConf.is_config(betas):
            betas = OmegaConf.to_container(betas)
        return {
            "lr": lr[0] if isinstance(lr, Collection) else lr,
            "betas": tuple(betas),
            "eps": self.cfg.adam_eps,
            "weight_decay": self.cfg.weight_decay,
        }

    @property
    def supports_flat_params(self) -> bool:
        """fairseq's fp16 and bf16 training hands over one flat float32 copy of the parameters."""
        return True

    def clip_grad_norm(self, max_norm, aggregate_norm_fn=None):
        """As fairseq's, with all norms in one call where no other rank holds a part of the gradient."""
        if aggregate_norm_fn is not None or any(hasattr(p, "expert") for p in self.params):
            return super().clip_grad_norm(max_norm, aggregate_norm_fn)
        limit = max_norm if max_norm > 0 else math.inf
        return torch.nn.utils.clip_grad_norm_(list(self.params), limit)
