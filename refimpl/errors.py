"""The exceptions of refimpl, as a tree.

    RefimplError
    ├── ConfigError            an engine option is wrong, or two contradict each other (raised at construction)
    │   └── UnknownOptionError    no option has that name
    ├── ModelError             a model cannot be had or read
    │   ├── ModelNotFoundError    nothing is at that path or name
    │   ├── UnsupportedModelError it is read, but it is not of a family that refimpl implements
    │   └── CheckpointError       its files are damaged, or tensors are missing, extra or misshapen
    ├── OutOfMemoryError       the weights or the KV cache do not fit the device
    ├── RankFailedError        a rank of a tensor-parallel engine died, hung or failed; the engine has to be made anew
    ├── EngineFailedError      a step failed while a request of AsyncLLM waited; the request is over
    ├── PartError              a replaceable part gave an answer that cannot be followed
    │   ├── PolicyError           a scheduling policy raised, or named nobody
    │   ├── AllocatorError        a block allocator gave a block that is not free, or too few
    │   └── PrefixIndexError      a prefix index found what is not there, or gave back what is in use
    └── RequestError           one request is wrong; the engine and the other requests go on
        ├── QueueFullError        max_num_queued_reqs wait already; come again later
        ├── AbortedError          somebody else ended it while its reader waited
        ├── SamplingParamsError   a sampling parameter is out of its range
        └── PromptError           the prompt is empty, too long, or has ids outside the vocabulary

Each message says what was given, what is allowed and what to do. The numbers in it are attributes too (``error.numbers``),
and an error of one request carries its id (``error.request_id``).
"""

from __future__ import annotations


class RefimplError(Exception):
    """The root of the tree: everything that refimpl raises on purpose.

    ``numbers`` holds the figures that the message names, for programs.
    """

    def __init__(self, message: str, **numbers: float) -> None:
        super().__init__(message)
        self.numbers = numbers


class ConfigError(RefimplError, ValueError):
    """An engine option is out of range, or two options contradict each other."""


class UnknownOptionError(ConfigError, TypeError):
    """An option of that name does not exist; the message names the nearest ones."""


class ModelError(RefimplError):
    """A model cannot be had, read or run."""


class ModelNotFoundError(ModelError, FileNotFoundError):
    """Neither a file, nor a folder, nor a name that can be downloaded."""

    def __str__(self) -> str:
        return str(self.args[0])


class UnsupportedModelError(ModelError):
    """The checkpoint is readable, but asks for something that refimpl does not implement."""


class CheckpointError(ModelError, ValueError):
    """A checkpoint's files are damaged, or its tensors do not fit its own configuration."""


class OutOfMemoryError(RefimplError, MemoryError):
    """The weights or the KV cache do not fit; the message says which option to change, and to what."""


class EngineFailedError(RefimplError):
    """The engine failed while a request of :class:`refimpl.AsyncLLM` waited for it. ``__cause__`` is what it raised."""


class RankFailedError(RefimplError):
    """A rank of a tensor-parallel engine died, hung or failed. The message says which and how; requests end with an error,
    and a new engine has to be made.
    """


class PartError(RefimplError):
    """A replaceable part (policy, allocator, prefix index) raised, or gave an answer that cannot be followed.

    What ran is ended with reason "error"; what waits goes on waiting, and the engine stays usable.
    """


class PolicyError(PartError):
    """A policy raised, or its answer cannot be followed: a victim that is none, a key that does not compare with others."""


class AllocatorError(PartError):
    """A block allocator gave a block that is not free, or another number of blocks than it was asked for."""


class PrefixIndexError(PartError):
    """A prefix index found blocks whose tokens are others, or gave back blocks that it may not."""


class RequestError(RefimplError, ValueError):
    """One request is refused. Nothing of it stays in the engine; the other requests go on."""

    def __init__(self, message: str, *, request_id: str | None = None, **numbers: float) -> None:
        super().__init__(message, **numbers)
        self.request_id = request_id


class SamplingParamsError(RequestError):
    """A sampling parameter is out of its range."""


class PromptError(RequestError):
    """The prompt is empty, too long for the model or the cache, or holds ids outside the vocabulary."""


class AbortedError(RequestError):
    """The request was aborted while a reader of :class:`refimpl.AsyncLLM` waited for it. Nothing was wrong with it."""


class QueueFullError(RequestError):
    """As many sequences wait as may wait. Nothing is wrong with the request."""
