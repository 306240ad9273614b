"""Turns every error of the S3 client into a `RemoteError` that contains only known words.

The text of the client's errors quotes what the server wrote. A server, or a proxy in front of it, may repeat a request's
headers, which contain credentials. So a message has the address, a status, and words from closed lists: whatever the
server writes can only choose between them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from kvoffload.model.causes import RemoteFault
from kvoffload.model.errors import RemoteError
from kvoffload.remote.address import BucketAddress

_SEARCHED = 10_000
"""How many characters of an error's text are searched. A server's answer may have any length."""
_STATUS = re.compile(r"Server returned non-2xx status code: (\d{3})")
# What is wrong, in the words of S3's error codes, of the client and of its library for certificates.
_NAMES = re.compile(
    r"(?:<Code>|kind: |InvalidCertificate\(\s*)"
    r"(AccessDenied|AccountProblem|AllAccessDisabled|AuthorizationHeaderMalformed|BandwidthLimitExceeded|EntityTooLarge"
    r"|ExpiredToken|IllegalLocationConstraintException|InternalError|InvalidAccessKeyId|InvalidArgument"
    r"|InvalidBucketName|InvalidObjectState|InvalidRequest|InvalidSecurity|InvalidToken|MethodNotAllowed|NoSuchBucket"
    r"|NoSuchKey|NotImplemented|NotSignedUp|OperationAborted|PermanentRedirect|PreconditionFailed|QuotaExceeded"
    r"|RequestTimeTooSkewed|RequestTimeout|ServiceUnavailable|SignatureDoesNotMatch|SlowDown|TemporaryRedirect"
    r"|TooManyRequests|XMinioAdminBucketQuotaExceeded|XMinioStorageFull"
    r"|Connect|Timeout"
    r"|BadEncoding|BadSignature|Expired|InvalidPurpose|NotValidForName|NotValidYet|Revoked|UnknownIssuer)"
    r"(?![a-z])"
)
# Patterns in an error's text, and what they mean for an operator.
_MEANINGS = {
    "BareRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraint|PermanentRedirect|TemporaryRedirect": (
        "the bucket may be in another region than AWS_REGION"
    ),
    "NotPartial": "the server answers a range with the whole object",
    "NoContentRange|UnexpectedRange|ParseContentRange": "the server answers a range without saying which",
    "MissingEtag": "the server answers without an ETag",
    "InvalidListResponse": "the server's listing has another form than S3's",
    '"dns error"': "dns error",
    "BadScheme": "an endpoint without TLS needs AWS_ALLOW_HTTP=true",
    "InvalidUri": "the endpoint is no URL with http:// or https://",
    "InvalidHeaderValue": "a credential contains a character that headers exclude, such as a line end",
    r"169\.254\.169\.254": "the environment has no credentials",
    "MissingAccessKeyId": "AWS_ACCESS_KEY_ID is missing",
    "MissingSecretAccessKey": "AWS_SECRET_ACCESS_KEY is missing",
}
_FAULTS = {
    **dict.fromkeys((401, 403, "ExpiredToken", "InvalidToken", "InvalidAccessKeyId"), RemoteFault.DENIED),
    **dict.fromkeys(
        (507, "QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "XMinioStorageFull"), RemoteFault.FULL
    ),
}


class AnsweredError(RemoteError):
    """Raised when the server answers with an error status.

    Args:
        message: the message, with known words only.
        status: the HTTP status.
        words: the known words that the answer contains.
    """

    def __init__(self, message: str, status: int, words: list[str]) -> None:
        faults = [_FAULTS[each] for each in (*words, status) if each in _FAULTS]
        super().__init__(message, faults[0] if faults else RemoteFault.OTHER)
        self.status = status
        self.is_missing = status == HTTPStatus.NOT_FOUND and "NoSuchBucket" not in words
        """Whether only the object does not exist, or the server does not say that the bucket is missing."""


class BadNameError(RemoteError):
    """Raised when the client rejects a listing because of a name in it, such as a name with "//"."""


@contextmanager
def translated(address: BucketAddress) -> Iterator[None]:
    """Turn whatever the client raises in the `with` block into a `RemoteError`.

    The client raises its own classes, but also `FileNotFoundError` after the status 404. A panic is no `Exception`.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # The process is to exit, or the call was cancelled.
        raise _translation(address, error) from None


def _translation(address: BucketAddress, error: BaseException) -> RemoteError:
    from obstore.exceptions import InvalidPathError

    text = str(error)[:_SEARCHED]
    kind = type(error).__name__
    if isinstance(error, InvalidPathError):
        return BadNameError(f"{address} fails: {kind}")
    words = list(dict.fromkeys(_NAMES.findall(text)))
    words += [meaning for pattern, meaning in _MEANINGS.items() if re.search(pattern, text)]
    if (found := _STATUS.search(text)) is None:
        return RemoteError(f"{address} fails: {', '.join(words or [kind])}", _fault_of(text))
    status = int(found[1])
    return AnsweredError(f"{address} fails: {', '.join([_phrase(status), *words])}", status, words)


def _fault_of(text: str) -> RemoteFault:
    """Return why there was no answer with a status. `reqwest` is the client's library for connections."""
    if "kind: Timeout" in text:
        return RemoteFault.TIMEOUT
    return RemoteFault.UNREACHABLE if "reqwest" in text else RemoteFault.OTHER


def _phrase(status: int) -> str:
    """Return a status with its standard phrase; without a phrase if no standard has the status."""
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)
