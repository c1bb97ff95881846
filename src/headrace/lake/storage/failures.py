"""Failed requests to object storage: whether to try again, and what to tell the user.

obstore tells only kinds of errors apart, and libraries of tables not even these. So status and reason are
taken from the text of an error. That text may hold secrets, such as the signature of a request, and is not
passed on as it is.
"""

import re
from typing import NamedTuple, Self

from headrace.lake.format import StorageError, plain

_STATUS = re.compile(r"status code:? ([0-9]{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9._-]{1,80})</Code>")
_CONNECTION = re.compile(
    r"kind: (Connect|Request|Timeout|Interrupted|Decode),|HTTP error|reading a body"
)
_DECORATION = re.compile(r"(\x1b\[[0-9;]*m|↳|\s)+")
"""Colours, arrows and indents, with which libraries of tables divide a text."""
_URL = re.compile(r"https?://([^/\s]+)\S*")

_OF_KEYS = (
    *("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken"),
    *("InvalidSecurity", "AuthenticationFailed", "TokenRefreshRequired"),
)
_OF_CLOCKS = ("RequestTimeTooSkewed", "RequestExpired")
_OF_BUCKETS = ("NoSuchBucket", "ContainerNotFound")
_OF_LOAD = ("SlowDown", "ServerBusy", "RequestLimitExceeded")
_OF_CONFLICTS = ("ConditionalRequestConflict", "OperationAborted")
_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND, _TIMEOUT, _CONFLICT, _TOO_MANY = 401, 403, 404, 408, 409, 429
_NOT_IMPLEMENTED = 501
_OF_ROLES = re.compile(
    r"https?://(169\.254\.|metadata\.google\.|[^/\s]*/(latest/(api/token|meta-data)|computeMetadata)\b)"
)
"""Addresses at which a machine asks for the credentials of its role."""


class Failure(NamedTuple):
    """A failed request."""

    text: str
    status: int | None
    """Status of the answer; None if there was none."""
    code: str
    """Reason that the store gives, such as `SlowDown`; empty if it gives none."""

    @classmethod
    def of(cls, error: BaseException | str) -> Self:
        text = str(error)
        status, code = _STATUS.search(text), _CODE.search(text)
        return cls(text, int(status[1]) if status else None, code[1] if code else "")

    @classmethod
    def of_table(cls, error: BaseException) -> Self | None:
        """Return the failed request that is the cause of an error of a library of tables, if one is."""
        found = cls.of(_DECORATION.sub(" ", str(error)))
        return found if found.status or _CONNECTION.search(found.text) else None

    @property
    def is_transient(self) -> bool:
        """True if the request may succeed later. It may have been carried out already."""
        if self.status is None:
            return bool(_CONNECTION.search(self.text)) and not self._is_of_credentials
        if self.status == _NOT_IMPLEMENTED:
            return False
        return self.status >= 500 or self.status in (_TIMEOUT, _TOO_MANY) or self.is_conflict

    @property
    def is_conflict(self) -> bool:
        """True if another request for the same name was under way. Nothing was carried out."""
        return self.status == _CONFLICT and self.code in _OF_CONFLICTS

    @property
    def is_missing_file(self) -> bool:
        return self.status == _NOT_FOUND and self.code not in (*_OF_BUCKETS, "NoSuchUpload")

    @property
    def _is_of_credentials(self) -> bool:
        """True if the machine has no role whose credentials could be asked for."""
        return bool(_OF_ROLES.search(self._first_line))

    @property
    def _first_line(self) -> str:
        return self.text.partition("\n")[0]

    def sentence(self, place: str) -> StorageError:
        """Return the error for the user; `place` is the address of the storage or of a file in it."""
        return StorageError(f"{place} {self._words()}")

    def _words(self) -> str:
        answer = f"{self.status or ''} {self.code}".strip()
        if self.status is None or self._is_of_credentials:
            return self._words_without_answer()
        if self.code in _OF_BUCKETS:
            return "is in a bucket that does not exist: create the bucket, or correct the address"
        if self.code in _OF_CLOCKS:
            return f"cannot be used, because the clock of this machine is wrong ({answer}): set it"
        if self.code in _OF_KEYS:
            return f"refuses the credentials ({answer}): correct the keys, or the profile"
        if self.status in (_FORBIDDEN, _UNAUTHORIZED):
            return (
                f"does not allow this ({answer}): use credentials that may list, read, write and delete "
                "there"
            )
        if self.code in _OF_LOAD or self.status == _TOO_MANY:
            return f"gets too many requests ({answer}): run fewer jobs at once, or try later"
        if self.status == _NOT_IMPLEMENTED:
            return f"is in a store that lacks something ({answer}): use one with conditional writes"
        if self.status >= 500:
            return f"is out of order ({answer}): run this again when the store works"
        if 300 <= self.status < 400 or self.code == "AuthorizationHeaderMalformed":
            return f"is in another region ({answer}): give the option AWS_REGION"
        return f"cannot be used ({answer}): check the address and the options"

    def _words_without_answer(self) -> str:
        found = _URL.search(self._first_line)
        host = found[1] if found else "the store"
        if self._is_of_credentials:
            return (
                "needs credentials: give keys as options or in the environment, name a profile, or give this "
                "machine a role"
            )
        if "dns error" in self.text:
            return f"cannot be reached, because no host is called {host}: correct the endpoint"
        if "ConnectionRefused" in self.text or "Connection refused" in self.text:
            return f"cannot be reached, because nothing listens at {host}: start it, or correct the endpoint"
        if "certificate" in self.text:
            return f"cannot be reached, because the certificate of {host} is not trusted"
        if "BareRedirect" in self.text or "redirect" in self._first_line:
            return "is in another region: give the option AWS_REGION"
        if "kind: Timeout" in self.text or "TimedOut" in self.text:
            return f"did not answer in time: see whether {host} works, and run this again"
        if _CONNECTION.search(self.text):
            return (
                f"lost the connection again and again: see whether {host} works, and run this again"
            )
        # An error of our own reading of a profile comes back with words of obstore before it.
        said = _URL.sub(lambda found: found[1], self._first_line.rpartition("LakeError: ")[2])
        return f"cannot be used: {plain(said)}"
