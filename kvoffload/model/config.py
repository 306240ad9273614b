"""The settings. All are checked before anything starts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from kvoffload.model.engine import Promises
from kvoffload.model.errors import ConfigError

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_MOST = 2**63 - 1  # the highest number of bytes, hits or tokens that a setting may have
_LONGEST_TIMEOUT_S = 10**9  # thirty years; the standard library rejects timeouts of several hundred
_LONGEST_SHOWN = 200  # characters of a name, or of a bad value in an error message

AUTO: Final = "auto"
"""`min_load_tokens`: use the measured break-even length."""

PER_RANK: Final = "cpu_bytes_to_use_per_rank"
"""The key of vLLM's own connector that gives the bytes of one rank."""

ALIASES = {
    "cpu_bytes_to_use": "host_bytes",
    PER_RANK: "host_bytes",
    "lazy_offload": "store_policy",
}
"""Keys of vLLM's own connector, with the setting that each of them sets."""

_BACKEND = "kv_offload_backend"
_NO_DISK = "belongs to another disk backend; kvoffload's own has disk_path and disk_bytes"
_NOT_HERE = {
    "disk_capacity_bytes": _NO_DISK,
    "disk_buffer_slots": _NO_DISK,
    "use_page_cache": _NO_DISK,
    "num_cpu_blocks": "counts blocks; set host_bytes, which counts bytes, instead",
}
"""Keys of vLLM's own connector that are refused, with the reason."""


def parse_bytes(value: object) -> int:
    """Parse a number of bytes: a whole number or a text such as "8GiB".

    A float with a whole value is allowed: vLLM derives `cpu_bytes_to_use` from the float of `--kv-offloading-size`.

    Raises:
        ValueError: the value is neither, or it is not between 1 and 2**63 - 1.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, float) and value.is_integer():
        number = int(value)
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        unit = match[2].upper()
        if unit not in _UNITS:
            raise ValueError
        number = int(Fraction(match[1]) * _UNITS[unit])
    else:
        raise ValueError
    if not 1 <= number <= _MOST:
        raise ValueError
    return number


def _one_of(*allowed: str) -> Meta:
    return Meta(pattern=rf"^({'|'.join(allowed)})\Z", description=f"one of {', '.join(allowed)}")


# The allowed values of each setting; error messages quote the description.
Bytes = Annotated[int, Meta(description='a positive number of bytes, such as 8589934592 or "8GiB"')]
Hits = Annotated[int, Meta(ge=0, le=_MOST, description="a number of hits, 0 or more")]
Seconds = Annotated[float, Meta(gt=0, le=_LONGEST_TIMEOUT_S, description="a positive number of seconds")]
Tokens = Annotated[
    Annotated[int, Meta(ge=0, le=_MOST)] | Literal["auto"],
    Meta(description=f'a number of tokens, 0 or more, or "{AUTO}"'),
]
Switch = Annotated[bool, Meta(description="true or false")]
File = Annotated[Path, Meta(description="a file's path")]
Folder = Annotated[Path, Meta(description="a folder's path")]
Name = Annotated[
    str, Meta(max_length=_LONGEST_SHOWN, pattern=r"\S", description="a name of at most 200 characters")
]
RemoteUrl = Annotated[
    str,
    Meta(
        pattern=r"^(mooncake|s3)://[^\s/@]+(/\S*)?(\?\S*)?\Z",
        description='"mooncake://HOST:PORT?protocol=tcp" or "s3://BUCKET/PREFIX", without credentials',
    ),
]
HttpUrl = Annotated[
    str,
    Meta(  # without secrets, because exporters log the URL
        pattern=r"^https?://[^\s/@?#][^\s@?#]*\Z",
        description='a URL such as "http://localhost:4318/v1/traces", without "@", "?" and "#"; '
        "give secrets in the environment variable OTEL_EXPORTER_OTLP_HEADERS",
    ),
]


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """The settings of one engine.

    Args:
        host_bytes: bytes of host memory for all ranks of the engine together.
        store_policy: "eager" stores blocks once they are computed, "lazy" when the device is about to evict them.
        min_load_tokens: shorter hits are recomputed; None means one block, "auto" the measured break-even length.
        verify: how much of a block is checksummed when it is stored and compared when it is loaded: nothing ("off"), a
            part ("sample") or all of it ("full"). Needs an engine that recomputes failed loads.
        transfer_timeout_s: seconds after submission at which a copy is abandoned.
        layout: how the device stores the KV cache: as the engine does ("engine"), or each block in one piece
            ("blocks").
        recurrent_prefix_boundaries: if a longer hit lacks only a recurrent state, ask the engine to keep that state.
        batch_copies: on CUDA, enqueue copies in batches if the driver supports it ("auto"), or one by one ("off").
        journal_path: file for the events; None for a ring in memory.
        journal_max_bytes: the most bytes of that file and the rotated one before it, together.
        disk_path: folder for the disk below host memory; None for none.
        disk_bytes: bytes of disk space for all ranks of the engine together.
        disk_min_hits: how often a block must be found again before it is written to the disk.
        disk_drain_s: the most seconds that an engine without requests keeps stepping for the disk, at its start and
            before it stops.
        weights_id: a name that you change whenever the weights change, for weights whose files cannot be read.
        remote_url: URL of the remote tier, which engines share below host and disk; None for none.
        remote_min_hits: how often a block must be found again before it is written to the remote tier.
        remote_timeout_s: seconds after which a call to the remote tier fails.
        tier_key_file: file with the secret key that authenticates blocks on the disk and in the remote tier; None if
            all writers are trusted.
        otlp_endpoint: URL of a collector for OpenTelemetry spans; None to use the one that the environment names, if
            any.
    """

    host_bytes: Bytes = 8 * 2**30
    store_policy: Annotated[str, _one_of("eager", "lazy")] = "eager"
    min_load_tokens: Tokens | None = None
    verify: Annotated[str, _one_of("off", "sample", "full")] = "off"
    transfer_timeout_s: Seconds = 30.0
    layout: Annotated[str, _one_of("engine", "blocks")] = "engine"
    recurrent_prefix_boundaries: Switch = True
    batch_copies: Annotated[str, _one_of("auto", "off")] = "auto"
    journal_path: File | None = None
    journal_max_bytes: Bytes = 2**30
    disk_path: Folder | None = None
    disk_bytes: Bytes = 64 * 2**30
    disk_min_hits: Hits = 1
    disk_drain_s: Seconds = 3.0
    weights_id: Name | None = None
    remote_url: RemoteUrl | None = None
    remote_min_hits: Hits = 0
    remote_timeout_s: Seconds = 2.0
    tier_key_file: File | None = None
    otlp_endpoint: HttpUrl | None = None


def size_text(number: float) -> str:
    """Return a number of bytes with a unit."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number:.0f} B"


def parse_config(raw: Mapping[str, object], ranks: int = 1) -> OffloadConfig:
    """Return the settings in `raw`; missing keys get their defaults.

    Args:
        raw: the settings as the operator wrote them.
        ranks: the engine's number of ranks; `cpu_bytes_to_use_per_rank` is multiplied by it.

    Raises:
        ConfigError: a key is unknown, or a value is not allowed. The message lists all such keys, each with the nearest
            valid one, and all such values, each with what is allowed.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError([f"settings are {_shown(raw)}; they must be keys with values"])
    problems: list[str] = []
    values: dict[str, Any] = {}
    typed: dict[str, str] = {}  # the operator's key, by the setting that it sets
    for name, value in raw.items():
        key = ALIASES.get(name, name)
        if (kind := _KINDS_OF_VLLM.get(name) or _KINDS.get(key)) is None:
            problems.append(_unknown(name))
            continue
        if (other := typed.setdefault(key, name)) != name:
            problems.append(f"{other} and {name} both set {key}; give one of the two")
            continue
        try:
            values[key] = (
                parse_bytes(value) if kind == Bytes else msgspec.convert(value, kind, dec_hook=_as_path)
            )
        except (ValueError, OverflowError):
            problems.append(f"{name} is {_shown(value)}; it must be {kind.__metadata__[0].description}")
    if problems:
        raise ConfigError(problems)
    return OffloadConfig(**_translated(raw, values, ranks))


def _translated(raw: Mapping[str, object], values: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return the values, with those of vLLM's own keys converted."""
    values.pop(_BACKEND, None)  # its only allowed value changes nothing
    if "lazy_offload" in raw:
        values["store_policy"] = "lazy" if values["store_policy"] else "eager"
    if PER_RANK in raw:
        values["host_bytes"] *= ranks
    return values


def check_promises(config: OffloadConfig, promises: Promises) -> None:
    """Check that an engine with these promises supports the settings.

    Checksums are compared after a load, so the engine must be able to recompute a corrupt block.

    Raises:
        ConfigError: a setting is not supported.
    """
    if config.verify != "off" and not promises.recovers_loads:
        problem = (
            f"verify is {config.verify!r}, but this engine fails a request whose load fails instead of recomputing what "
            "it lacks, so a block that is found corrupt would cost its request; let the engine recompute (in vLLM: "
            '"kv_load_failure_policy":"recompute" in --kv-transfer-config), or set verify to \'off\''
        )
        raise ConfigError([problem])


def _shown(value: object) -> str:
    """Return a value as shown in an error, at most `_LONGEST_SHOWN` characters long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # more digits than Python prints, or nested too deep
        return f"a {type(value).__name__} that is too large to show"
    text = re.sub(r"//.*@", "//...@", text)  # credentials in a URL
    text = re.sub(r"(//.*?[?#]).*", r"\1...", text)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _unknown(name: str) -> str:
    if name in _NOT_HERE:
        return f"{name} {_NOT_HERE[name]}"
    known = [*_KINDS, *ALIASES, *_KINDS_OF_VLLM]
    near = difflib.get_close_matches(_shown(name).strip("'"), known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else f"; known keys: {', '.join(_KINDS)}"
    return f"unknown key {_shown(name)}{hint}"


def _as_path(_: type, value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise ValueError
    return Path(value)


def _kind_of(hint: Any) -> Any:  # noqa: ANN401  # an annotated type, or its union with None
    return hint if get_origin(hint) is Annotated else get_args(hint)[0]


_KINDS = {name: _kind_of(hint) for name, hint in get_type_hints(OffloadConfig, include_extras=True).items()}
_KINDS_OF_VLLM: dict[str, Any] = {
    "lazy_offload": Switch,
    _BACKEND: Annotated[Literal["cpu"], Meta(description='"cpu": kvoffload keeps blocks in host memory')],
}
"""Types of vLLM's own keys whose values differ from those of the setting they set, or that set none."""
