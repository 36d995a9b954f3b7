"""The set of trainable parameters, and whether it is still the one that the module was wrapped with. Torch alone.

Promise: a change of ``requires_grad`` is seen by one look at each parameter; an added parameter by a walk over the
module, for which there is a method of its own. Between two looks the caches of a small machine have seen a whole step,
so that each costs several times what a tight loop suggests: hence the methods that look at some of them only.
"""

from __future__ import annotations

from collections.abc import Collection
from operator import attrgetter

from torch import Tensor, nn

_requires_grad = attrgetter("requires_grad")

# How many parameters a glance looks at.
_GLANCE = 32


class TrainableSet:
    """The parameters of a module, and which of them were trainable when this was made.

    Args:
        module: the module.
        ignored: the names of the parameters that DDP was told to leave alone.

    Attributes:
        names: the names of all its parameters but the ignored ones.
        parameters: the parameters themselves, in the same order.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str]) -> None:
        named = [(name, parameter) for name, parameter in module.named_parameters() if name not in ignored]
        self.names = [name for name, _ in named]
        self.parameters: list[Tensor] = [parameter for _, parameter in named]
        self._module = module
        self._ignored = ignored
        self._next_glance = 0
        self.accept()

    def now(self) -> list[bool]:
        """For each parameter whether it is trainable now."""
        return list(map(_requires_grad, self.parameters))

    def has_changed(self) -> bool:
        """Whether some parameter was frozen or unfrozen since."""
        return self.now() != self._flags

    def unfrozen(self) -> list[int]:
        """The parameters that were unfrozen since, by their places; looks at those that were frozen."""
        return [index for index in self._frozen if self.parameters[index].requires_grad]

    def glance(self) -> bool:
        """Whether some parameter was frozen since, of the few whose turn it is; in step on all ranks."""
        trainable, first = self._trainable, self._next_glance
        self._next_glance = first + _GLANCE if first + _GLANCE < len(trainable) else 0
        return not all(self.parameters[index].requires_grad for index in trainable[first : first + _GLANCE])

    def accept(self) -> None:
        """Take the set as it is now for the one to compare with."""
        self._flags = self.now()
        self._frozen = [index for index, trainable in enumerate(self._flags) if not trainable]
        self._trainable = [index for index, trainable in enumerate(self._flags) if trainable]

    def added(self) -> list[str]:
        """The names of the trainable parameters that the module has now and did not have then."""
        known = set(self.parameters)
        return [
            name
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad and parameter not in known and name not in self._ignored
        ]
