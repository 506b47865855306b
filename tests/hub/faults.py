"""What can go wrong between a client and a Hub."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Fault:
    """Strikes the next requests that it matches.

    Args:
        where: regular expression that the method and path begin with, such as "PUT /large/".
        times: how often.
        skip: so many requests that match go through before.
        status, headers: answer this instead.
        drop_after: close the connection after so many bytes of the request's body.
        hang_after: read no more after so many bytes, as if the network had stopped.
        lose_answer: do what is asked, and close the connection instead of answering.
        delay: seconds before the answer.
        struck: set as soon as it does.
    """

    where: str
    times: int = 1
    skip: int = 0
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    drop_after: int | None = None
    hang_after: int | None = None
    lose_answer: bool = False
    delay: float = 0.0
    struck: threading.Event = field(default_factory=threading.Event)

    def strikes(self, request: str) -> bool:
        """Whether this request is one of those; counts it."""
        if not self.times or not re.match(self.where, request):
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times -= 1
        return True
