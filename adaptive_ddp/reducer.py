"""Finish the gradient reduction of a ``DistributedDataParallel`` inside the backward that left it unfinished.

Promise: after :func:`finish_reduction` (or :meth:`Reduction.finish`) returns, the wrapper's reducer is finalized on
this rank, every bucket that other ranks wait for has been launched, and every gradient is the mean over the ranks. No
step is replayed and no gradient is lost.

Limits: this file speaks for one rank. That other ranks finish too, and what they do about it together, is the caller's
business (``strategy.py``). It must be called after every backward that was to be synchronised, before any other
collective of this rank.

This is the only file of the package that touches torch's private API, and it imports torch alone. What it uses, with
the file of torch that defines it (read in torch 2.13.0; run with 2.12.0, 2.13.0 and 2.14.1):

* ``Reducer._check_reducer_finalized``: returns at once when the reduction finished, raises the reduction error when it
  did not (``torch/csrc/distributed/c10d/reducer.cpp``, ``ensure_prior_reduction_finished``). The error's text lists the
  indices of the missing parameters, 100 at most.
* ``Reducer._autograd_hook(index)``: what the reducer's own hook on a parameter calls when that parameter's gradient is
  ready (same file, ``autograd_hook``). A no-op while the reducer expects no gradients.
* ``Reducer._remove_autograd_hooks``: takes the reducer's hooks off the parameters (same file).
* ``DistributedDataParallel._comm_hooks``: the communication hooks that were registered, with their state
  (``torch/nn/parallel/distributed.py``, ``register_comm_hook``).
* ``torch._C._will_engine_execute_node``: asked during a backward, whether that backward will reach a node
  (``torch/csrc/autograd/init.cpp``; it looks the node up in what the engine has collected before it starts, and walks
  no graph).
* ``Tensor._backward_hooks``: the hooks of ``register_hook``; to set it to None takes the empty dictionary off the C++
  side of the tensor too (``torch/csrc/autograd/python_variable.cpp``, ``THPVariable_set_backwards_hooks``).
* ``DistributedDataParallel._build_params_for_reducer``: the reducer's parameters in the reducer's order, and which of
  them produce sparse gradients (``torch/nn/parallel/distributed.py``).
* ``DistributedDataParallel._ddp_init_helper`` and ``_build_debug_param_to_name_mapping``: what the constructor makes
  the reducer and its logger with; ``_has_rebuilt_buckets``, ``_lazy_init_ran``, ``Reducer._set_optimizer_in_backward``
  and ``Reducer._set_mixed_precision_param_dtype``: what else it, or the first forward, tells them (same file). For
  :func:`rebuild_reducer` alone.
* ``torch.autograd.Variable._execution_engine.queue_callback``: what the reducer queues its own final callback with
  (``torch/csrc/autograd/python_engine.cpp``). For :func:`at_end_of_backward` alone.
* ``torch._C._current_graph_task_id``: inside a backward, its number; each backward of the process gets the next one
  (``torch/csrc/autograd/graph_task.h``). For :func:`backwards_begun` alone.
* ``Tensor._post_accumulate_grad_hooks``: as ``_backward_hooks``, for ``register_post_accumulate_grad_hook``. For
  :func:`forget_removed_accumulation_hooks` alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

CHECKED_TORCH_VERSIONS = ("2.12.0", "2.13.0", "2.14.1")

_PRIVATE_CALLS = (
    (DistributedDataParallel, "_build_params_for_reducer"),
    (torch._C, "_will_engine_execute_node"),
    (Tensor, "_backward_hooks"),
    (getattr(torch._C, "_distributed_c10d", None), "Reducer._autograd_hook"),
    (getattr(torch._C, "_distributed_c10d", None), "Reducer._check_reducer_finalized"),
    (getattr(torch._C, "_distributed_c10d", None), "Reducer._remove_autograd_hooks"),
)

_PRIVATE_CALLS_OF_REBUILDING = (
    (DistributedDataParallel, "_ddp_init_helper"),
    (DistributedDataParallel, "_build_debug_param_to_name_mapping"),
    (torch.autograd.Variable, "_execution_engine.queue_callback"),
)

# The digits are anchored on the sentence around them: with TORCH_DISTRIBUTED_DEBUG set, the same text also holds the
# parameters' names, which may contain numbers.
_MISSING_INDICES = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
_UNFINISHED = "Expected to have finished reduction in the prior iteration"
# What the check says of a reducer that has all its gradients and has not come to its final callback yet: it takes the
# lack of a missing parameter for a fault of its own.
_ALL_READY = "!unmarked_param_indices.empty()"


def require_private_api(*, rebuilds: bool = False) -> None:
    """Refuse a torch that lacks a call this file depends on.

    Args:
        rebuilds: ask for the calls of :func:`rebuild_reducer` and :func:`at_end_of_backward` too.

    Raises:
        RuntimeError: if one is missing; the message names the installed version, the missing calls and the versions
            that have them.
    """
    calls = _PRIVATE_CALLS + (_PRIVATE_CALLS_OF_REBUILDING if rebuilds else ())
    missing = [path for owner, path in calls if not _has(owner, path)]
    if missing:
        raise RuntimeError(
            f"torch {torch.__version__} has no {', '.join(missing)}, which adaptive_ddp needs to finish a gradient"
            f" reduction. Install a torch it was checked on: {', '.join(CHECKED_TORCH_VERSIONS)}."
            ' Until then, strategy="ddp_find_unused_parameters_true" trains the same models.'
        )


def _has(owner: object, path: str) -> bool:
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return owner is not None


class _FireHooks(torch.autograd.Function):
    """A node whose backward fires reducer hooks.

    The reducer queues its final callback on the autograd engine, which accepts one only during a backward pass
    (``torch/csrc/autograd/engine.cpp``, ``Engine::queue_callback``); so the hooks are fired from inside one.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, reducer: Any, indices: list[int]) -> Tensor:
        ctx.reducer = reducer
        ctx.indices = indices
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        for index in ctx.indices:
            ctx.reducer._autograd_hook(index)
        return None, None, None


class Finished(NamedTuple):
    """What :meth:`Reduction.finish` found to do on this rank.

    Attributes:
        missing: the parameters whose hooks it fired, at the start of the backward or after it.
        unused: those of them that got no gradient in this accumulation window either, each with the gradient it had
            before: None, or a copy.
    """

    missing: frozenset[int]
    unused: dict[int, Tensor | None]


class Reduction:
    """The reducer of one wrapper, seen from outside.

    Build it right after wrapping: the reducer's parameters are those that were trainable at that moment.

    Args:
        ddp: the wrapper, as its constructor left it.

    Attributes:
        parameters: the parameters that the reducer reduces, in its order.
        names: their names in ``ddp.module``, in the same order; of a shared parameter the first name.
        parameter_set: the same, to look one up in.
        expects_sparse: for each of them, whether the reducer expects its gradient to be sparse.
        device: where the reducer's buckets are.
        nodes: the autograd nodes that accumulate the parameters' gradients.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        # Untyped, for the private calls.
        wrapper: Any = ddp
        self._ddp = wrapper
        self.parameters: list[Tensor]
        self.expects_sparse: list[bool]
        self.parameters, self.expects_sparse = wrapper._build_params_for_reducer()
        self.parameter_set = frozenset(self.parameters)
        name_of: dict[Tensor, str] = {parameter: name for name, parameter in ddp.module.named_parameters()}
        self.names = [name_of[parameter] for parameter in self.parameters]
        self.device: torch.device = self.parameters[0].device
        # The smallest, so that setting its gradient aside on every step costs next to nothing.
        self._canary = min(
            range(len(self.parameters)), key=lambda index: (self.expects_sparse[index], self.parameters[index].numel())
        )
        self._canary_may_hold = True
        # Whether waking the reducer may change the canary's gradient: it becomes part of a bucket, is divided in place
        # (reducer.cpp, mark_variable_ready_dense and _sparse), or the reduction is complete at once.
        self._wake_writes = (
            ddp.gradient_as_bucket_view or self.expects_sparse[self._canary] or len(self.parameters) == 1
        )

        # Kept alive, since the engine knows them by identity; the reducer keeps the same nodes (reducer.cpp).
        self.nodes = [get_gradient_edge(parameter).node for parameter in self.parameters]
        self._early: _EarlyFiring | None = None

    def look(self) -> None:
        """Right before a backward: spare :meth:`finish` the question whether it reached anything, as far as possible.

        A gradient that was not there before and is there afterwards is the answer.
        """
        self._canary_may_hold = self.parameters[self._canary].grad is not None

    def begin(self, loss: Tensor, expected: Collection[int], is_used: Callable[[int], bool] | None) -> None:
        """Have the hooks of parameters that are expected to be missing fired at the start of the next backward.

        So no bucket waits for them until the end. Each is fired only if that backward will not reach it, which is
        asked when it starts. Call it right before the backward, and :meth:`finish` after it.

        Args:
            loss: the root of the backward.
            expected: the parameters to ask for. What a backward inside the backward would reach (reentrant activation
                checkpointing) must not be among them: the engine does not foresee that, and a hook that fires twice is
                an error.
            is_used: as for :meth:`finish`, or None if none of them is.
        """
        self._early = None
        if expected and loss.grad_fn is not None:
            self._early = _EarlyFiring(self, loss, expected, is_used)

    def finish(
        self,
        is_used: Callable[[int], bool],
        *,
        wakes: bool = True,
        within_backward: bool = False,
        before_firing: Callable[[], None] | None = None,
    ) -> Finished:
        """Fire the hooks that this rank's backward did not fire, and so finish the reduction.

        Call it right after a synchronised backward, on every rank, before any other collective. A rank with nothing
        missing returns at once (one check in C++). A rank with something missing marks those parameters ready with
        what their ``.grad`` holds, or zeros, and returns when the reduction is complete on it, which takes the other
        ranks' part of the same backward.

        Args:
            is_used: whether the missing parameter with this index got its gradient from an earlier backward of the
                same accumulation window. Asked before anything is done to that parameter.
            wakes: whether to start the reduction of a backward that reached none of the parameters. To be left out
                for a wrapper with ``find_unused_parameters=True``, which may have that parameter down as unused.
            within_backward: it is called at the end of the backward, from :func:`at_end_of_backward`. Then it waits for
                nothing; the reduction is complete when that backward returns.
            before_firing: called if something is missing, before the hook that completes this rank's part of the
                reduction is fired, and so before the reduction is complete on any rank. Not with a single parameter.

        Raises:
            RuntimeError: if the process group fails (a rank died, a time-out), or torch reports the missing parameters
                in a way that this version does not understand.
        """
        unused: dict[int, Tensor | None] = {}
        fired: list[int] = []
        if self._early is not None:
            fired, unused = self._early.end()
            self._early = None
        missing = self.missing()
        # After a hook that was fired, early or by the backward, the check shows the stall.
        may_be_silent = self._canary_may_hold or self.parameters[self._canary].grad is None
        self._canary_may_hold = True
        if may_be_silent and wakes and not (missing or fired or (within_backward and self._has_begun())):
            used = is_used(self._canary)
            gradient = self.prepare(self._canary, copy=self._wake_writes)
            if self._wake(within_backward=within_backward):
                if not self._wake_writes:
                    gradient = self.prepare(self._canary, copy=True)
                fired.append(self._canary)
                if not used:
                    unused[self._canary] = gradient
                missing = self.missing()
        if missing and before_firing is not None:
            before_firing()
        while missing:
            for index in missing:
                used = is_used(index)
                gradient = self.prepare(index, copy=not used)
                if not used:
                    unused[index] = gradient
            self._fire(missing, within_backward=within_backward)
            fired.extend(missing)
            missing = self.missing()
        return Finished(frozenset(fired), unused)

    def expect(self, loss: Tensor) -> None:
        """Under the flag, have the reducer look for unused parameters in the graph of ``loss`` instead.

        The wrapped forward has had it look in that of what it returned, which this rank's loss has nothing of. To be
        called between that forward and the backward (``torch/nn/parallel/distributed.py``, ``_post_forward``).
        """
        self._ddp.reducer.prepare_for_backward([loss])

    def restore(self, index: int, gradient: Tensor | None) -> None:
        """Give a parameter back the gradient that :meth:`finish` set aside.

        Args:
            index: the parameter's index in the reducer.
            gradient: what :meth:`finish` returned for it.
        """
        parameter = self.parameters[index]
        if gradient is None or parameter.grad is None or gradient.is_sparse:
            parameter.grad = gradient
        else:
            # In place: with gradient_as_bucket_view the gradient has to stay a view into its bucket.
            parameter.grad.copy_(gradient)

    def missing(self) -> list[int]:
        """The parameters that the reducer still waits for, once any hook fired; 100 at most."""
        try:
            self._ddp.reducer._check_reducer_finalized()
        except RuntimeError as error:
            if _ALL_READY in str(error):
                return []
            if _UNFINISHED not in str(error):
                raise
            listed = _MISSING_INDICES.search(str(error))
            if listed is None:
                raise RuntimeError(
                    f"torch {torch.__version__} words its reduction error differently from the versions that"
                    f" adaptive_ddp was checked on ({', '.join(CHECKED_TORCH_VERSIONS)}), so the parameters without a"
                    " gradient cannot be told from it. The error is the cause of this one."
                ) from error
            return [int(index) for index in listed.group(1).split()]
        return []

    def _has_begun(self) -> bool:
        """Whether a hook has fired in a reduction that is not final yet."""
        try:
            self._ddp.reducer._check_reducer_finalized()
        except RuntimeError:
            return True
        return False

    def _wake(self, *, within_backward: bool) -> bool:
        """Fire the canary's hook; return whether the reducer was still waiting for it.

        A rank whose backward reached none of the reducer's parameters passes the check although the others wait for
        it: torch looks at whether any hook fired. Firing one shows the difference, since it does nothing on a reducer
        that has finished.
        """
        if len(self.parameters) > 1:
            self._ddp.reducer._autograd_hook(self._canary)
            return bool(self.missing())
        if within_backward:
            self._ddp.reducer._autograd_hook(self._canary)
            return self._has_begun()
        # The only hook completes the reduction, for which it has to fire inside a backward, and leaves nothing to
        # check: what shows that it was needed is that the gradient was written.
        parameter = self.parameters[self._canary]
        version = None if parameter.grad is None else parameter.grad._version
        self._fire([self._canary], within_backward=False)
        return version != (None if parameter.grad is None else parameter.grad._version)

    def mark_ready(self, indices: Iterable[int]) -> None:
        """Fire parameters' hooks; inside a backward."""
        fire = self._ddp.reducer._autograd_hook
        for index in indices:
            fire(index)

    def prepare(self, index: int, *, copy: bool) -> Tensor | None:
        """Make a parameter fit to be marked ready; return a copy of its gradient, if that is asked for."""
        parameter = self.parameters[index]
        if parameter.grad is not None:
            return parameter.grad.clone() if copy else None
        if self.expects_sparse[index]:
            # The reducer takes no undefined gradient for zeros here (reducer.cpp, mark_variable_ready_sparse).
            parameter.grad = empty_sparse_gradient(parameter)
        return None

    def _fire(self, indices: list[int], *, within_backward: bool) -> None:
        if within_backward:
            # A backward of its own would run the reducer's final callback, which waits for the other ranks.
            self.mark_ready(indices)
            return
        with torch.enable_grad():
            # On the buckets' device, so that the engine runs the node with that device's streams.
            anchor = torch.zeros((), device=self.device, requires_grad=True)
            fired: Any = _FireHooks.apply(anchor, self._ddp.reducer, indices)  # type: ignore[no-untyped-call]
        fired.backward()


class _EarlyFiring:
    """Fires hooks at the start of one backward."""

    def __init__(
        self, reduction: Reduction, loss: Tensor, expected: Collection[int], is_used: Callable[[int], bool] | None
    ) -> None:
        self._reduction = reduction
        self._expected = expected
        self._is_used = is_used
        self._fired: list[int] = []
        self._unused: dict[int, Tensor | None] = {}
        self._is_done = False
        self._handle: Any = loss.register_hook(self._fire)  # type: ignore[no-untyped-call]

    def end(self) -> tuple[list[int], dict[int, Tensor | None]]:
        """Return what was fired, and what of it is unused, with the gradients it had."""
        self._handle.remove()
        return self._fired, self._unused

    def _fire(self, gradient: Tensor) -> None:
        if self._is_done or not self._is_real_backward():
            return
        self._is_done = True
        reduction, is_used = self._reduction, self._is_used
        will_reach, nodes = torch._C._will_engine_execute_node, reduction.nodes
        self._fired = [index for index in self._expected if not will_reach(nodes[index])]
        for index in self._fired:
            used = is_used is not None and is_used(index)
            before = reduction.prepare(index, copy=not used)
            if not used:
                self._unused[index] = before
        reduction.mark_ready(self._fired)

    def _is_real_backward(self) -> bool:
        """Whether this is a backward that the reducer takes part in.

        A module's own ``backward`` may first ask ``torch.autograd.grad`` for something of the same loss, which reaches
        no parameter, or takes one for an input; the reducer sees nothing of that.
        """
        will_reach = torch._C._will_engine_execute_node
        try:
            return any(
                index not in self._expected and will_reach(node) for index, node in enumerate(self._reduction.nodes)
            )
        except RuntimeError:
            # Of a parameter that is an input of torch.autograd.grad there is no telling.
            return False


def empty_sparse_gradient(parameter: Tensor) -> Tensor:
    """A sparse gradient of the parameter's shape without a single row."""
    return torch.sparse_coo_tensor(
        torch.empty((1, 0), dtype=torch.long, device=parameter.device),
        parameter.new_empty((0, *parameter.shape[1:])),
        parameter.shape,
    )


def gradient_or_zeros(parameter: Tensor, *, sparse: bool) -> Tensor:
    """A parameter's gradient, or in place of None what the reducer takes for it."""
    if parameter.grad is not None:
        return parameter.grad
    return empty_sparse_gradient(parameter) if sparse else torch.zeros_like(parameter)


def sparse_parameters(module: nn.Module) -> frozenset[Tensor]:
    """The parameters that DDP expects sparse gradients of (``distributed.py``, ``_build_params_for_reducer``)."""
    return frozenset(
        parameter
        for embedding in module.modules()
        if isinstance(embedding, (nn.Embedding, nn.EmbeddingBag)) and embedding.sparse
        for parameter in embedding.parameters(recurse=False)
    )


def forget_removed_hooks(parameter: Tensor) -> None:
    """Have a parameter whose tensor hooks were all removed be as if it had never had one.

    Otherwise torch goes on looking for hooks in the empty dictionary in every backward.
    """
    if parameter._backward_hooks is not None and not parameter._backward_hooks:
        parameter._backward_hooks = None


def forget_removed_accumulation_hooks(parameter: Any) -> None:
    """The same for hooks of ``register_post_accumulate_grad_hook``."""
    if parameter._post_accumulate_grad_hooks is not None and not parameter._post_accumulate_grad_hooks:
        parameter._post_accumulate_grad_hooks = None


def backwards_begun() -> int:
    """How many backwards this process has begun, the one that this call runs in order to tell included.

    Those that are run inside another one count too. What it says is of use for differences only.
    """
    numbers: list[int] = []
    with torch.enable_grad():
        loss: Any = torch.zeros((), requires_grad=True) + 0
    loss.register_hook(lambda gradient: numbers.append(torch._C._current_graph_task_id()))
    loss.backward()
    return numbers[0]


def dismantle(ddp: DistributedDataParallel) -> None:
    """Take a wrapper off its module: remove its autograd hooks and free its buckets.

    The module can be wrapped again afterwards; the old wrapper cannot be used any more. Without this the hooks of a
    wrapper that somebody still refers to would go on firing, and its buckets would stay allocated beside the new ones.

    Args:
        ddp: a wrapper whose reduction has finished.
    """
    reducer: Any = ddp.reducer
    reducer._remove_autograd_hooks()
    # With DDP's own mixed precision the wrapper has hooks on every submodule too (distributed.py, __init__).
    for module in ddp.module.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if getattr(hook, "__self__", None) is ddp:
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
    # The logger holds the reducer too (torch/csrc/distributed/c10d/logger.hpp).
    ddp.logger = None
    del reducer, ddp.reducer


def rebuild_reducer(ddp: DistributedDataParallel, *, find_unused_parameters: bool) -> None:
    """Give a wrapper a new reducer for the parameters that are trainable now, and leave it the object that it is.

    Everything else of the wrapper stays: its options, its communication hooks with their state, the parameters it
    ignores, its own mixed precision, whoever's forward hooks, and the gradients. The old reducer's hooks are removed
    and its buckets freed before the new ones are allocated. No collective; to be called on every rank in the same
    step, outside the wrapper's forward and after a synchronised backward. What it calls is what the constructor calls
    after its checks and its broadcasts (``torch/nn/parallel/distributed.py``, ``__init__``, torch 2.13.0).

    Args:
        ddp: a wrapper whose reduction has finished, at least one of whose parameters is trainable.
        find_unused_parameters: the flag to go on with.
    """
    wrapper: Any = ddp
    wrapper.reducer._remove_autograd_hooks()
    # The logger holds the reducer too (torch/csrc/distributed/c10d/logger.hpp).
    wrapper.logger = None
    del wrapper.reducer
    wrapper.find_unused_parameters = find_unused_parameters
    wrapper._has_rebuilt_buckets = False
    parameters, expects_sparse = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper._ddp_init_helper(parameters, expects_sparse, names, False)
    if wrapper.mixed_precision is not None:
        wrapper.reducer._set_mixed_precision_param_dtype(wrapper.mixed_precision.param_dtype)
    # Done by the first forward (_setup_in_backward_optimizers), which registers a communication hook with it.
    if wrapper._lazy_init_ran and any(hasattr(p, "_in_backward_optimizers") for p in wrapper._module_parameters):
        wrapper.reducer._set_optimizer_in_backward()
    hooks: list[tuple[Any, Any]] = wrapper._comm_hooks
    wrapper._comm_hooks = []
    for hook, state in hooks:
        _forget_buckets(state, will_rebuild=not find_unused_parameters)
        wrapper.register_comm_hook(state, hook)


def at_end_of_backward(loss: Tensor, callback: Callable[[], None]) -> RemovableHandle:
    """Have the next backward from ``loss`` call back when all its gradients are there, before any reducer waits.

    With several wrappers in one backward, each rank would otherwise wait in that backward for the first wrapper that
    another rank has something missing of, which that rank cannot finish while it waits for another one itself.

    Args:
        loss: the root of the backward; requires grad.
        callback: called once, inside that backward.

    Returns:
        What takes the call back off the loss again, after the backward.
    """
    engine: Any = torch.autograd.Variable._execution_engine

    # At the start of the backward, so that it comes before what the reducers queue on the way.
    def queue(gradient: Tensor) -> None:
        engine.queue_callback(callback)

    handle: RemovableHandle = loss.register_hook(queue)  # type: ignore[no-untyped-call]
    return handle


def has_comm_hook(ddp: DistributedDataParallel) -> bool:
    """Whether a communication hook written in Python is registered on the wrapper."""
    return bool(ddp._comm_hooks)


def uses_power_sgd(ddp: DistributedDataParallel) -> bool:
    """Whether one of PowerSGD's hooks is registered on the wrapper, wrapped in another or not."""
    return any(isinstance(state, PowerSGDState) for _, state in ddp._comm_hooks)


def move_comm_hooks(old: DistributedDataParallel, new: DistributedDataParallel) -> None:
    """Register on a new wrapper the communication hooks that somebody registered on the old one.

    Their state goes along, without what it holds for single buckets, whose layout is another now: PowerSGD's error
    feedback and factors (``torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py``). Where the new wrapper will
    still rebuild its buckets (the flag off) PowerSGD also begins its warm-up again, which is there to outlast that.

    Args:
        old: the dismantled wrapper.
        new: its successor. A hook that is registered on it already stays the only one.
    """
    hooks: list[tuple[Any, Any]] = old._comm_hooks
    for _, state in hooks:
        _forget_buckets(state, will_rebuild=not new.find_unused_parameters)
    if hooks and not new._comm_hooks:
        for hook, state in hooks:
            new.register_comm_hook(state, hook)


def _forget_buckets(state: Any, *, will_rebuild: bool) -> None:
    """Clear what a communication hook's state holds for single buckets; see :func:`move_comm_hooks`."""
    if isinstance(state, PowerSGDState):
        state.error_dict.clear()
        state.p_memory_dict.clear()
        state.q_memory_dict.clear()
        if will_rebuild:
            state.iter = 0


def finish_reduction(ddp: DistributedDataParallel) -> list[str]:
    """Finish on this rank what ``loss.backward()`` left unfinished, for a hand-written loop on a bare wrapper.

    Call it on every rank, right after each ``backward()`` that synchronises (not inside ``no_sync()``) and before any
    other collective. Afterwards every trainable parameter holds the mean of the ranks' gradients, in which a rank
    that had none counts as zeros; one that no rank used holds zeros, or what it held before. Nothing is lost, and
    there is nothing to undo.

    Args:
        ddp: the wrapper, built with ``find_unused_parameters=False``, with the same parameters trainable as when it
            was built.

    Returns:
        The names (in ``ddp.module``) of the parameters that were missing on this rank, in the reducer's order; empty
        on a rank that reached them all.

    Raises:
        RuntimeError: if the process group fails, or this torch lacks the private calls that this needs.
    """
    require_private_api()
    reduction = Reduction(ddp)
    return [reduction.names[index] for index in sorted(reduction.finish(is_used=lambda index: False).missing)]
