"""The reference that uses no DDP: what each parameter's gradient has to be, computed in the plainest way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from package import DDPStrategy


class OracleStrategy(DDPStrategy):
    """Lightning's launch and devices, an unwrapped module, and a reduction of one gather per parameter.

    After each synchronised backward a parameter that some rank used in this accumulation window gets the sum of the
    ranks' gradients, in rank order, over the world size; one that no rank used keeps what it had.
    """

    def __init__(self, broadcast_buffers: bool) -> None:
        super().__init__()
        self._broadcasts_buffers = broadcast_buffers
        self._accumulating = False
        self._broadcasts_next = True
        self._used: set[int] = set()

    def _setup_model(self, model):  # type: ignore[no-untyped-def]
        ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
        for name, tensor in model.state_dict().items():
            if name not in ignored:
                dist.broadcast(tensor, 0)
        # Frozen ones too, since they may be unfrozen later.
        self._parameters = [p for n, p in model.named_parameters() if n not in ignored]
        self._handles = []
        for parameter in self._parameters:
            trainable = parameter.requires_grad
            parameter.requires_grad_(True)
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._note))
            parameter.requires_grad_(trainable)
        return model

    def _note(self, parameter: torch.Tensor) -> None:
        # Called with no gradient too, if a custom autograd function returned None.
        if parameter.grad is not None:
            self._used.add(id(parameter))

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # DDP's rule: before a forward, if the one before it was to be synchronised (or there was none). Under manual
        # optimization Lightning lets no forward count as synchronised.
        if self._broadcasts_buffers and self._broadcasts_next:
            for buffer in self.lightning_module.buffers():
                dist.broadcast(buffer, 0)
        self._broadcasts_next = self.lightning_module.automatic_optimization and not self._accumulating
        output = super().training_step(*args, **kwargs)
        if output is None and self.lightning_module.automatic_optimization:
            # Lightning ends a distributed run here. A loss that reaches nothing contributes nothing.
            return torch.zeros((), requires_grad=True)
        return output

    def backward(self, closure_loss, optimizer, *args, **kwargs):  # type: ignore[no-untyped-def]
        if not closure_loss.requires_grad:
            closure_loss = closure_loss + torch.zeros((), requires_grad=True)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self.precision_plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)
        if not self._accumulating:
            used = torch.tensor([id(parameter) in self._used for parameter in self._parameters]).int()
            dist.all_reduce(used)
            for parameter, used_by in zip(self._parameters, used.tolist(), strict=True):
                if used_by:
                    self._reduce(parameter)
            self._used.clear()
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    def _reduce(self, parameter: torch.Tensor) -> None:
        world_size = dist.get_world_size()
        mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        mine = mine.to_dense().contiguous()
        gathered = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(gathered, mine)
        total = torch.zeros_like(mine)
        for gradient in gathered:
            total += gradient / world_size
        if parameter.grad is None or parameter.grad.is_sparse:
            parameter.grad = total
        else:
            parameter.grad.copy_(total)

    def teardown(self) -> None:
        for handle in getattr(self, "_handles", ()):
            handle.remove()
        super().teardown()
