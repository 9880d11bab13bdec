"""A master that is away for a while: a time-out for every request, and one patience with all that may pass.

The SDK repeats a request for 15 s, on 502, 503 and 504 alone, and sets no time-out. Its sessions take another policy
(``max_retries``): here none, so that one place waits for everything and says so. What lasts is said at once: 400, 401,
403, 404 and a certificate that is not trusted.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from recipe.errors import Refused

PATIENCE = 600.0  # seconds that a master may be away
HICCUP = 5.0  # seconds of it that nobody needs to hear of
TIMEOUT = (10.0, 60.0)  # seconds for a connection, and of silence while an answer is waited for
NO_LOGIN = "no valid login at {}; run `det user login USER`, or set DET_USER and DET_PASS"
_LASTING = (400, 401, 403, 404)
_TOO_EARLY = (408, 425, 429)


class Away(Exception):
    """No answer of a master, which may pass. Not one of the SDK's errors: on those it drops the user's login."""

    def __init__(self, why: str, status: int | None = None, connected: bool = True):
        super().__init__(why)
        self.status, self.connected = status, connected

    @property
    def rejected(self) -> bool:
        """Whether something certainly did not do what it was asked."""
        return self.status is not None and 400 <= self.status < 500 and self.status not in _TOO_EARLY


def passing(error: Exception) -> Away | None:
    """What of an error may pass; None of one that lasts, and of a defect."""
    import requests
    from determined.common.api import bindings, errors

    if isinstance(error, Away):
        return error
    if isinstance(error, errors.ForbiddenException | errors.UnauthenticatedException):
        return None
    if isinstance(error, errors.APIException):
        by_master = error.status_code != 404 or bool(error.message)  # a proxy's 404 says nothing of an experiment
        if error.status_code in _LASTING and by_master:
            return None
        return Away(f"{error.status_code} {_told(error)}".rstrip(), error.status_code)
    if isinstance(error, requests.exceptions.SSLError) and "certificate" in str(error).lower():
        return None
    if isinstance(error, errors.MasterNotFoundException | errors.BadRequestException | requests.RequestException):
        if isinstance(error, json.JSONDecodeError):
            return Away("an answer that is no JSON")
        if "Max retries exceeded" in str(error):  # of none: what the SDK leaves of urllib3's own kinds
            return Away("no connection", connected=False)
        return Away("silence" if "timed out" in str(error) else "an answer that broke off")
    if isinstance(error, bindings.APIHttpError):
        return Away("an answer that broke off")
    if isinstance(error, json.JSONDecodeError):
        return Away("an answer that is no JSON")
    if isinstance(error, KeyError | TypeError | AttributeError | ValueError) and _while_reading(error):
        return Away(f"an answer of another form ({type(error).__name__}: {first_line(error)})")
    return None


def _while_reading(error: Exception) -> bool:
    """Whether the SDK was making its objects of an answer."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals["__name__"].startswith("determined.common.api."):
            return True
        trace = trace.tb_next
    return False


def _told(error) -> str:
    """The master's own words, or the status's; a proxy's page is not for a line."""
    if error.status_code != 404 and getattr(error, "response_error", None):
        return first_line(error)
    try:
        return HTTPStatus(error.status_code).phrase
    except ValueError:
        return ""


def first_line(error: Exception) -> str:
    """An error in one line, in the master's own words where its gateway wrapped them."""
    text = str(error).strip()
    try:
        text = json.loads(text)["message"]
    except (ValueError, KeyError, TypeError):
        pass
    return text.splitlines()[0][:300] if text else type(error).__name__


class _Timed:
    """A session of the SDK with a time-out a request, which never repeats one by itself."""

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self._max_retries = 0

    def _do_request(self, method, path, params, json, data, headers, timeout, stream):
        try:
            return super()._do_request(method, path, params, json, data, headers, timeout or TIMEOUT, stream)
        except Exception as error:
            if (away := passing(error)) is None:
                raise
            raise away from error


@contextmanager
def timed() -> Iterator[None]:
    """Sessions that the SDK makes in here have a time-out a request, the one to log in as well."""
    from determined.common import api

    kinds = api.Session, api.UnauthSession
    api.Session, api.UnauthSession = (type(kind.__name__, (_Timed, kind), {}) for kind in kinds)
    try:
        yield
    finally:
        api.Session, api.UnauthSession = kinds


@contextmanager
def in_one_line(address: str) -> Iterator[None]:
    """The master's refusals as one line each."""
    import requests
    from determined.common.api import errors

    try:
        yield
    except errors.UnauthenticatedException:
        raise Refused(NO_LOGIN.format(address)) from None
    except errors.BadRequestException as error:
        raise Refused(f"the master at {address} answers: {first_line(error)}") from None
    except requests.exceptions.SSLError as error:
        raise Refused(
            f"the certificate of {address} is not trusted ({first_line(error)}); set DET_MASTER_CERT_FILE"
        ) from None


class Patience:
    """Asks a master at ``address`` again and again.

    Args:
        say: shows a line to the user: once what is waited for, once that it is over.
        limit: seconds until it is given up.
    """

    def __init__(
        self,
        address: str,
        say: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
        limit: float = PATIENCE,
    ):
        self._address, self._say, self._sleep, self._limit = address, say, sleep, limit

    def asked(self, question: Callable[[], Any], known: tuple[type[Exception], ...] = (), found: bool = True) -> Any:
        """The answer to a question that may be asked any number of times.

        Args:
            known: errors that are answers, and the caller's.
            found: whether a master was there before; if not, one that cannot be reached at all is not waited for.

        Raises:
            Refused: what lasts, or lasted longer than the limit.
        """
        waited, pause, said = 0.0, 1.0, False
        while True:
            start = time.monotonic()
            try:
                answer = question()
            except Exception as error:
                away = passing(error)
                if away is None and isinstance(error, known):
                    raise
                if away is None:
                    with in_one_line(self._address):
                        raise
            else:
                if said:
                    self._say(f"{self._address} answers again")
                return answer
            if not found and not away.connected:
                raise Refused(f"no master answers at {self._address}; set DET_MASTER, or try again later") from None
            if not found and away.status == 404:
                raise Refused(f"what answers at {self._address} is no Determined master; set DET_MASTER") from None
            waited += time.monotonic() - start
            if waited >= self._limit:
                raise Refused(
                    f"{self._address} gave no answer for {_minutes(self._limit)} (last: {away}); an experiment goes on "
                    "by itself, and the same command follows it again"
                ) from None
            if not said and waited + pause > HICCUP:
                self._say(f"{self._address} does not answer; asking again for {_minutes(self._limit)} ({away})")
                said = True
            self._sleep(pause)
            waited, pause = waited + pause, min(pause * 2, 30.0)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 60 else f"{seconds:.0f} s"
