"""The Hub's client when it writes: patient, quiet, its errors in one line, and never with a token in them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from .. import __version__
from ..common.errors import EnvironmentFailure, KvfoldError, UserError
from ..common.sources import PASSING, causes, first_line, http_status

if TYPE_CHECKING:
    from huggingface_hub import HfApi

Result = TypeVar("Result")

_WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before each further try, where the Hub names none
_LONGEST_WAIT = 330.0  # the Hub counts requests in windows of five minutes
_PASSING_KINDS = frozenset({"TimeoutException", "NetworkError", "RemoteProtocolError"})  # of httpx, whatever its name
_OUR_FAULTS = (AssertionError, AttributeError, NameError, TypeError)
_TOKEN = re.compile(r"\bhf_\w{4,}|(?<=Bearer )[^\s'\"]+")
_LOGIN = "run hf auth login, or set HF_TOKEN"

# What a status says, and the way out. {said} is what the Hub says itself.
_REFUSALS = {
    400: "the Hub does not take what was sent for {repo}: {said}",
    401: f"the Hub does not take the token for {{repo}}; {_LOGIN}",
    402: "the Hub asks for payment before {repo} can hold this: {said}",
    403: "the token may not write to {repo} ({said}); use one with the right to write, or a repository of your own",
    404: "{repo} cannot be seen ({said}); check the name, and that the token may write to it",
    409: "{repo} is in the way of what was asked for ({said}); see its page, then run the same command again",
    412: "{repo} was changed by somebody meanwhile; run the same command again",
    413: "{repo} takes nothing of this size: {said}",
}


def hub_client() -> HfApi:
    """A client that sends the user's token with every request.

    Raises:
        UserError: there is none.
    """
    from huggingface_hub import HfApi, get_token

    if not get_token():
        raise UserError(f"there is no token for the Hub; {_LOGIN}")
    return HfApi(token=True, library_name="kvfold", library_version=__version__)


def patiently(call: Callable[[], Result]) -> Result:
    """Call again, after a while, as long as what stops it may pass. Only for calls that the client does not repeat."""
    for wait in _WAITS:
        try:
            return call()
        except Exception as error:
            if not may_pass(error):
                raise
            time.sleep(min(_asked_to_wait(error) or wait, _LONGEST_WAIT))
    return call()


def may_pass(error: BaseException) -> bool:
    """Whether an error of the client may be gone in a while: too many requests, a server or a network in trouble."""
    return any(
        http_status(cause) in PASSING
        or any(kind.__name__ in _PASSING_KINDS and kind.__module__.startswith("httpx") for kind in type(cause).__mro__)
        for cause in causes(error)
    )


def _asked_to_wait(error: Exception) -> float | None:
    """Seconds after which the Hub will listen again, by what it says itself."""
    headers = getattr(getattr(error, "response", None), "headers", {})
    if (after := headers.get("Retry-After", "")).isdigit():
        return float(after)
    match = re.search(r"\bt\s*=\s*(\d+)", headers.get("RateLimit", ""))
    return float(match[1]) + 1 if match else None


@contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Turn what the client raises while it works on a repository into our errors, without their causes, which may hold
    a token.

    Raises:
        UserError: the Hub said no.
        EnvironmentFailure: it cannot be reached, or is in trouble, even after several tries.
    """
    try:
        with _quiet():
            yield
    except (KvfoldError, *_OUR_FAULTS):
        raise
    except Exception as error:
        raise _meaning(error, repo) from None


def _meaning(error: Exception, repo: str) -> KvfoldError:
    from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled

    chain = list(causes(error))
    if any(isinstance(cause, LocalTokenNotFoundError) for cause in chain):
        return UserError(f"there is no token for the Hub; {_LOGIN}")
    if any(isinstance(cause, OfflineModeIsEnabled) for cause in chain):
        return EnvironmentFailure("the Hub is out of reach as HF_HUB_OFFLINE is set; unset it")
    # A token that no header can hold stands in the client's words, and in those of the codec.
    if any(isinstance(c, UnicodeEncodeError) or type(c).__name__ == "LocalProtocolError" for c in chain):
        return UserError(f"the token for the Hub has characters that no token has; {_LOGIN}")
    goes_on = "the same command goes on where this one stopped"
    answered = next((cause for cause in chain if http_status(cause)), None)
    if answered is not None and (status := http_status(answered)) and not may_pass(answered):
        said = getattr(answered, "server_message", None) or f"HTTP {status}"
        template = _REFUSALS.get(status, "the Hub refuses (HTTP {status}) what was asked for {repo}: {said}")
        return UserError(template.format(repo=repo, status=status, said=redacted(first_line(said)).rstrip(".")))
    if answered is not None:
        return EnvironmentFailure(f"the Hub is busy or in trouble (HTTP {http_status(answered)}); later, {goes_on}")
    if may_pass(error) or any(isinstance(cause, ConnectionError | TimeoutError) for cause in chain):
        return EnvironmentFailure(f"the Hub cannot be reached; {goes_on}")
    cause = chain[-1]
    if isinstance(cause, OSError) and cause.strerror:
        where = f" {cause.filename}" if cause.filename else ""
        return EnvironmentFailure(f"cannot read{where}: {cause.strerror}")
    said = redacted(first_line(error))
    return EnvironmentFailure(f"the upload to {repo} failed ({type(error).__name__}: {said}); {goes_on}")


def redacted(text: str) -> str:
    """A text without the user's token, or anything like one."""
    with suppress(Exception):  # whatever is wrong with it, an error is being told
        from huggingface_hub import get_token

        if token := get_token():
            text = text.replace(token, "<token>")
    return _TOKEN.sub("<token>", text)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the client from drawing, and from warning: its lines name addresses that let whoever reads them write."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, logging

    verbosity, drawn = logging.get_verbosity(), not are_progress_bars_disabled()
    logging.set_verbosity_error()
    disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if drawn:
            enable_progress_bars()
