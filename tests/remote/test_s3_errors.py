"""Checks what errors of an S3 server say: known words, and nothing that the server wrote."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from http import HTTPStatus

import pytest

from kvoffload.model.causes import RemoteFault
from kvoffload.model.errors import RemoteError
from kvoffload.model.ids import BlockKey
from kvoffload.remote import bucket
from kvoffload.remote.address import BucketAddress
from kvoffload.remote.bucket import BucketStore
from kvoffload.remote.packs import Place
from kvoffload.remote.values import Shard
from tests.captured_logs import capture_logs
from tests.remote.http_servers import BUCKET, S3Server

SECRET = "session/token+of=an:engine"
KEY, OTHER = BlockKey(b"key" * 11), BlockKey(b"other" * 6)
SHARD = Shard("print/generation", 0, 1)
# What the server writes looks like S3's answers, and like the words that are searched in the client's texts.
BODY = (
    f"<Error><Code>{SECRET}</Code><{SECRET}/><Message>{SECRET} status code: 403 {SECRET} kind: {SECRET} "
    f"source: reqwest InvalidCertificate({SECRET})</Message></Error>"
).encode() * 50
STATUSES = sorted({*map(int, HTTPStatus), 299, 399, 499, 599, 999})
ANSWERS = [(status, {"X": SECRET}) for status in STATUSES]
ANSWERS += [
    (status, {"Location": f"http://127.0.0.1:1/{SECRET}"}) for status in STATUSES if status // 100 == 3
]


@pytest.fixture
def store(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> BucketStore:
    monkeypatch.setattr(bucket, "LOOK_PERIOD_S", 0.0)
    return BucketStore(BucketAddress(BUCKET), 5.0)


def get(store: BucketStore) -> object:
    """Read a block of a known pack."""
    store._catalogue(SHARD).add("pack", {KEY: Place("pack", 0, 8)})
    return store.get(SHARD, [KEY], [memoryview(bytearray(8))])


CALLS: dict[str, Callable[[BucketStore], object]] = {
    "ask": lambda store: store.ask(SHARD, [OTHER]),
    "get": get,
    "put": lambda store: store.put(SHARD, [OTHER], [memoryview(bytes(8))]),
    "read": lambda store: store.read("name"),
    "create": lambda store: store.create("name", b"data"),
    "replace": lambda store: store.replace("name", b"data"),
    "first look": lambda store: store.first_look(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_no_status_of_a_server_that_repeats_secrets_takes_them_to_a_message(
    server: S3Server, store: BucketStore, call: Callable[[BucketStore], object]
) -> None:
    errors = list[RemoteError]()
    with capture_logs() as lines:
        for answer in ANSWERS:
            server.override = lambda _, answer=answer: (*answer, BODY)  # type: ignore[misc]
            try:
                call(store)
            except RemoteError as error:
                errors.append(error)
    shown = ["".join(traceback.format_exception(error)) for error in errors]
    assert [text for text in (*shown, *map(str, lines)) if SECRET in text] == []
    assert max(len(str(text)) for text in (*errors, *lines)) < 500
    # A put that is refused does not raise.
    assert len(errors) + len(lines) > len(ANSWERS) / 2 or call is CALLS["put"]


def test_no_panic_of_the_client_takes_its_text_to_a_message(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_SKIP_SIGNATURE")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", f"{SECRET}\n")  # as a mounted file with a line end gives it
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with pytest.raises(RemoteError, match="fails: a credential contains a character") as raised:
        BucketStore(BucketAddress(BUCKET), 5.0).first_look()
    assert SECRET not in str(raised.value)


def s3_error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>{SECRET}</Message></Error>".encode()


@pytest.mark.parametrize(
    ("status", "code", "fault"),
    [
        (403, "AccessDenied", RemoteFault.DENIED),
        (403, "InvalidAccessKeyId", RemoteFault.DENIED),
        (403, "SignatureDoesNotMatch", RemoteFault.DENIED),
        (403, "RequestTimeTooSkewed", RemoteFault.DENIED),
        (400, "ExpiredToken", RemoteFault.DENIED),
        (403, "QuotaExceeded", RemoteFault.FULL),
        (507, "XMinioStorageFull", RemoteFault.FULL),
        (404, "NoSuchBucket", RemoteFault.OTHER),
        (503, "SlowDown", RemoteFault.OTHER),
        (500, "InternalError", RemoteFault.OTHER),
    ],
)
def test_a_known_error_code_is_named(
    server: S3Server, store: BucketStore, status: int, code: str, fault: RemoteFault
) -> None:
    server.override = lambda _: (status, {}, s3_error(code))
    for call in ("ask", "get", "read", "create", "replace", "first look"):
        if (call, code) == ("get", "NoSuchBucket"):
            continue
        with pytest.raises(RemoteError, match=rf"{status} [A-Z][A-Za-z ]+, {code}$") as raised:
            CALLS[call](store)
        assert raised.value.fault is fault, call
    with capture_logs() as lines:
        assert store.put(SHARD, [OTHER], [memoryview(b"value")]) == [False]
    assert code in lines[0]["reason"]
    assert store.refusals.fault is fault


@pytest.mark.parametrize(
    ("status", "headers", "body", "words"),
    [
        (301, {}, s3_error("PermanentRedirect"), "another region than AWS_REGION"),
        (400, {}, s3_error("AuthorizationHeaderMalformed"), "another region than AWS_REGION"),
        (200, {"Content-Range": "bytes 0-0/9"}, b"the value", "answers a range with the whole object"),
        (206, {}, b"the value", "answers a range without saying which"),
        (206, {"Content-Range": "bytes 5-8/9"}, b"alue", "answers a range without saying which"),
    ],
)
def test_what_else_a_server_does_wrong_is_named(
    server: S3Server, store: BucketStore, status: int, headers: dict[str, str], body: bytes, words: str
) -> None:
    server.override = lambda _: (
        status,
        {"ETag": "0", "Last-Modified": "Tue, 24 Nov 2026 00:00:00 GMT", **headers},
        body,
    )
    with pytest.raises(RemoteError, match=words):
        store.read("name")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"AWS_ENDPOINT": "127.0.0.1:1"}, "no URL with http"),
        ({"AWS_ALLOW_HTTP": "false"}, "needs AWS_ALLOW_HTTP=true"),
        ({"AWS_SKIP_SIGNATURE": "false", "AWS_ACCESS_KEY_ID": "key"}, "AWS_SECRET_ACCESS_KEY is missing"),
        ({"AWS_ENDPOINT": "http://127.0.0.1:1"}, "Connect"),
    ],
)
def test_an_ordinary_mistake_in_the_environment_is_named(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str
) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RemoteError, match=words):
        BucketStore(BucketAddress(BUCKET), 5.0).first_look()
