"""RequestBook: which requests an engine works on, and the last ones that it finished."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

from refimpl.errors import RequestError
from refimpl.request import Request, Sequence

FINISHED_KEPT = 1000
"""Finished requests that ``explain`` still knows."""


class RequestBook:
    """Requests by id: each unfinished one, and the last 1,000 that have ended."""

    def __init__(self) -> None:
        self._unfinished: dict[str, Request] = {}
        self._finished: OrderedDict[str, Request] = OrderedDict()
        self._doomed: deque[Request] = deque()

    @property
    def unfinished_ids(self) -> list[str]:
        """The ids of the requests of which more may come, in order of arrival."""
        return list(self._unfinished)

    def unfinished(self, request_id: str) -> Request | None:
        """The unfinished request of an id."""
        return self._unfinished.get(request_id)

    def known(self, request_id: str) -> tuple[Request, ...]:
        """The unfinished request of an id, and the one that ended if it is one of the last."""
        return tuple(filter(None, (self._unfinished.get(request_id), self._finished.get(request_id))))

    def only_unfinished(self, requests: Iterable[Request]) -> list[Request]:
        """Those of some requests of which more may come."""
        unfinished = self._unfinished
        return [request for request in requests if unfinished.get(request.request_id) is request]

    def check_free(self, request_id: str) -> None:
        """See that a new request may have this id.

        Raises:
            RequestError: an unfinished one has it.

        """
        if request_id in self._unfinished:
            raise RequestError(f"request id {request_id!r} is in use by an unfinished request", request_id=request_id)

    def add(self, request: Request) -> None:
        """Write a new request down."""
        self._unfinished[request.request_id] = request

    def retire(self, request: Request) -> None:
        """Nothing more comes of a request: keep it for ``explain``, and forget the oldest of those."""
        del self._unfinished[request.request_id]
        self._finished[request.request_id] = request
        self._finished.move_to_end(request.request_id)
        while len(self._finished) > FINISHED_KEPT:
            self._finished.popitem(last=False)

    def doom(self, request_ids: Iterable[str]) -> None:
        """Note that requests are to be aborted, when the engine can. Any thread may call this."""
        self._doomed.extend(filter(None, map(self._unfinished.get, request_ids)))

    def take_doomed(self) -> list[str]:
        """The ids that were noted, of requests that have not ended since."""
        doomed = [self._doomed.popleft() for _ in range(len(self._doomed))]
        return [request.request_id for request in self.only_unfinished(doomed)]

    def find(self, request_id: str) -> Request:
        """A request, unfinished or finished lately.

        Raises:
            RequestError: none of that id is known.

        """
        request = self._unfinished.get(request_id) or self._finished.get(request_id)
        if request is None:
            raise RequestError(
                f"no request {request_id!r} is known; explain keeps unfinished ones and {FINISHED_KEPT} finished",
                request_id=request_id,
            )
        return request

    def sample(self, request_id: str, index: int) -> Sequence:
        """An unfinished sample, to be forked.

        Raises:
            RequestError: there is none.

        """
        request = self._unfinished.get(request_id)
        if request is None:
            raise RequestError(f"no unfinished request {request_id!r} to fork", request_id=request_id)
        if not 0 <= index < len(request.sequences) or request.sequences[index].finished:
            raise RequestError(
                f"request {request_id!r} has no unfinished sample {index}; it began with {len(request.sequences)}",
                request_id=request_id,
            )
        return request.sequences[index]
