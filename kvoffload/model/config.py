"""The settings. All of them are checked before anything starts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import Meta

from kvoffload.model.engine import Promises
from kvoffload.model.errors import ConfigError
from kvoffload.model.peers import find_counterpart

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_MOST = 2**63 - 1  # the largest value of a setting that counts bytes, hits or tokens
# About thirty years: the standard library rejects timeouts of several hundred years.
_LONGEST_TIMEOUT_S = 10**9
_LONGEST_SHOWN = 200  # the maximum length, in characters, of a name, and of a bad value in an error

AUTO: Final = "auto"
"""The value of `min_load_tokens` that selects the measured break-even length, and that of `store_policy` that selects the
policy which finds most."""

ADVICE: Final = "advised: at least three times the device's KV cache"
"""The advice on `host_bytes` if the machine is not known."""

PER_RANK: Final = "cpu_bytes_to_use_per_rank"
"""The key that sets the host bytes of one rank in vLLM's own connector."""

ALIASES = {
    "cpu_bytes_to_use": "host_bytes",
    PER_RANK: "host_bytes",
    "lazy_offload": "store_policy",
}
"""Maps the configuration keys of vLLM's own connector to our settings."""

_BACKEND = "kv_offload_backend"

_RENAMED = {
    "spill_after_hits": "disk_min_hits",
    "disk_identity": "weights_id",
}
"""Maps former key names to the present names. Names that resemble the present ones are not listed."""


def parse_bytes(value: object) -> int:
    """Parse a number of bytes: a whole number or a string such as "8GiB".

    A float with a whole value is allowed, because vLLM computes `cpu_bytes_to_use` from a float.

    Raises:
        ValueError: the value is not a number of bytes between 1 and 2**63 - 1.
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
    return Meta(pattern=rf"^({'|'.join(allowed)})\Z", title=f"one of {', '.join(allowed)}")


# The types of settings. A type's title lists the allowed values.
Bytes = Annotated[int, Meta(title='a number of bytes, such as "64GiB"')]
Hits = Annotated[int, Meta(ge=0, le=_MOST, title="a number of hits, 0 or more")]
Seconds = Annotated[float, Meta(gt=0, le=_LONGEST_TIMEOUT_S, title="a positive number of seconds")]
Tokens = Annotated[
    Annotated[int, Meta(ge=0, le=_MOST)] | Literal["auto"],
    Meta(title=f'a number of tokens, 0 or more, or "{AUTO}"'),
]
Switch = Annotated[bool, Meta(title="true or false")]
Policy = Annotated[str, _one_of("eager", "lazy", "twice", "auto")]
Verify = Annotated[str, _one_of("off", "sample", "full")]
Layout = Annotated[str, _one_of("engine", "blocks")]
Batches = Annotated[str, _one_of("auto", "off")]
File = Annotated[Path, Meta(title="a file's path")]
Folder = Annotated[Path, Meta(title="a folder's path")]
Name = Annotated[
    str, Meta(max_length=_LONGEST_SHOWN, pattern=r"\S", title="a name of at most 200 characters")
]
RemoteUrl = Annotated[
    str,
    Meta(
        pattern=r"^(mooncake|s3)://[^\s/@]+(/\S*)?(\?\S*)?\Z",
        title='"mooncake://HOST:PORT?protocol=tcp" or "s3://BUCKET/PREFIX", without credentials',
    ),
]
HttpUrl = Annotated[
    str,
    Meta(  # secrets are rejected, because exporters log the URL
        pattern=r"^https?://[^\s/@?#][^\s@?#]*\Z",
        title='a URL such as "http://localhost:4318/v1/traces", without "@", "?" and "#"; '
        "give secrets in the environment variable OTEL_EXPORTER_OTLP_HEADERS",
    ),
]


def _key(meaning: str, *, unset: str = "not set") -> Meta:
    """Return the description of a settings key.

    Args:
        meaning: what the key sets.
        unset: what documents show as the default if the key has none.
    """
    return Meta(description=meaning, extra={"unset": unset})


class OffloadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one engine. `kvoffload settings` and docs/configure.md print the keys' descriptions."""

    host_bytes: Annotated[
        Bytes, _key("host memory of one engine, all its ranks together", unset="must be given")
    ]
    host_path: Annotated[
        Folder | None,
        _key(
            "folder on a tmpfs for host memory, in which the next start finds its blocks",
            unset="memory that ends with the engine",
        ),
    ] = None
    host_hugetlbfs: Annotated[
        Folder | None,
        _key(
            "with host_path: folder on a hugetlbfs that has the memory itself, in huge pages",
            unset="memory in host_path",
        ),
    ] = None
    host_keep: Annotated[Switch, _key("keep the files of host_path when the engine stops")] = True
    host_orphan_bytes: Annotated[
        Bytes | None,
        _key("bytes that files of stopped engines in host_path may take", unset="host_bytes and an eighth"),
    ] = None
    node_share: Annotated[
        Switch, _key("fetch blocks from other engines of this machine that have the same host_path")
    ] = True
    host_share: Annotated[
        Switch, _key("ranks whose blocks have the same bytes share one copy, on the host and on lower tiers")
    ] = True
    store_policy: Annotated[
        Policy,
        _key(
            "store blocks once computed, before the device evicts them, or when used twice; auto: what finds most"
        ),
    ] = "eager"
    min_load_tokens: Annotated[
        Tokens | None,
        _key(
            "shorter hits are recomputed; auto: hits below the measured break-even length", unset="one block"
        ),
    ] = None
    verify: Annotated[Verify, _key("how much of a block is checksummed at its store and its load")] = "off"
    disk_path: Annotated[Folder | None, _key("folder of the disk tier, below host memory")] = None
    disk_bytes: Annotated[Bytes, _key("disk space of one engine, all its ranks together")] = 64 * 2**30
    disk_min_hits: Annotated[Hits, _key("hits before a block goes to the disk; 0: every stored block")] = 1
    remote_url: Annotated[RemoteUrl | None, _key("remote tier, a store that engines share")] = None
    remote_min_hits: Annotated[Hits, _key("hits before a block is shared; 0: every stored block")] = 0
    weights_id: Annotated[
        Name | None, _key("name for weights that cannot be read; change it when they change")
    ] = None
    tier_key_file: Annotated[File | None, _key("secret key that authenticates the lower tiers' blocks")] = (
        None
    )
    journal_path: Annotated[File | None, _key("file of the journal", unset="the last events, in memory")] = (
        None
    )
    journal_max_bytes: Annotated[Bytes, _key("size limit of the journal and its rotated file, NAME.1")] = (
        2**30
    )
    otlp_endpoint: Annotated[
        HttpUrl | None, _key("collector of spans", unset="the value of OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    ] = None

    transfer_timeout_s: Annotated[Seconds, _key("time after which a submitted copy is abandoned")] = 30.0
    disk_drain_s: Annotated[Seconds, _key("time for which the disk may keep an idle engine stepping")] = 3.0
    remote_timeout_s: Annotated[Seconds, _key("time after which a call to the remote tier has failed")] = 2.0
    layout: Annotated[
        Layout, _key("layout of the device's KV cache: the engine's choice, or each block in one piece")
    ] = "engine"
    recurrent_prefix_boundaries: Annotated[
        Switch, _key("ask the engine for the missing recurrent state at the end of a shared prefix")
    ] = True
    batch_copies: Annotated[
        Batches, _key("on a GPU: many copies per driver call if possible, or one copy per call")
    ] = "auto"

    @property
    def orphan_bytes(self) -> int:
        """Return how many bytes the files of stopped engines may take. They are a little larger than their slots."""
        return self.host_orphan_bytes or self.host_bytes * 9 // 8

    @property
    def has_tiers(self) -> bool:
        """Return whether the engine has a tier below the host."""
        return self.disk_path is not None or self.remote_url is not None

    @property
    def outlives_engine(self) -> bool:
        """Return whether later processes may find the engine's blocks: in a lower tier, or in the files of host memory."""
        return self.has_tiers or self.host_path is not None


ADVANCED = {
    *("transfer_timeout_s", "disk_drain_s", "remote_timeout_s"),
    *("layout", "recurrent_prefix_boundaries", "batch_copies"),
}
"""Keys that operators change only to work around a problem."""


def size_text(number: float) -> str:
    """Return a number of bytes as text with a unit, such as "8.0 GiB"."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number:.0f} B"


def parse_config(raw: Mapping[str, object], ranks: int = 1, advice: str = ADVICE) -> OffloadConfig:
    """Return the operator's settings, with defaults for missing keys. `host_bytes` must be given.

    Args:
        raw: the operator's keys and values.
        ranks: the engine's number of ranks, by which `cpu_bytes_to_use_per_rank` is multiplied.
        advice: how to choose `host_bytes`, for the error when the key is missing.

    Raises:
        ConfigError: `host_bytes` is missing, a key is unknown, or a value is not allowed. The message lists all unknown
            keys, each with the nearest valid one, and all bad values, each with the allowed values.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError([f"settings are {_shown(raw)}; they must be keys with values"])
    problems: list[str] = []
    values: dict[str, Any] = {}
    typed: dict[str, str] = {}  # for each setting, the key by which the operator set it
    guessed: set[str] = set()  # the valid keys that unknown keys resemble
    for name, value in raw.items():
        key = ALIASES.get(name, name)
        kind = _TYPES_OF_VLLM.get(name) or (SETTINGS[key].type if key in SETTINGS else None)
        if kind is None:
            near, problem = _unknown(name)
            guessed |= {ALIASES.get(near, near)} if near else set()
            problems.append(problem)
            continue
        if (other := typed.setdefault(key, name)) != name:
            problems.append(f"{other} and {name} both set {key}; give one of the two")
            continue
        try:
            values[key] = (
                parse_bytes(value) if _is_size(kind) else msgspec.convert(value, kind, dec_hook=_as_path)
            )
        except (ValueError, OverflowError):
            problems.append(f"{name} is {_shown(value)}; it must be {_allowed(kind)}")
    if "host_bytes" not in typed.keys() | guessed:
        missing = SETTINGS["host_bytes"]
        problems.append(f"host_bytes is missing: {missing.meaning}, {missing.allowed}; {advice}")
    problems += _incomplete(values, typed)
    if problems:
        raise ConfigError(problems)
    return OffloadConfig(**_translated(raw, values, ranks))


def _incomplete(values: Collection[str], typed: Collection[str]) -> list[str]:
    """Return the problems of settings that need others, of those that were given."""
    if "host_hugetlbfs" in values and "host_path" not in typed:
        return [
            "host_hugetlbfs needs host_path, a folder on a tmpfs that has the table of the blocks; set both"
        ]
    return []


def _translated(raw: Mapping[str, object], values: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return the values, with the values of vLLM's own keys converted to values of our settings."""
    values.pop(_BACKEND, None)  # the key's only allowed value changes nothing
    if "lazy_offload" in raw:
        values["store_policy"] = "lazy" if values["store_policy"] else "eager"
    if PER_RANK in raw:
        values["host_bytes"] *= ranks
    return values


def check_promises(config: OffloadConfig, promises: Promises) -> None:
    """Check that an engine with these promises supports the settings.

    Raises:
        ConfigError: `verify` is on, but the engine cannot recompute a corrupt block.
    """
    if config.verify != "off" and not promises.recovers_loads:
        problem = (
            f"verify is {config.verify!r}, but this engine fails a request whose load fails, and does not recompute the "
            "missing tokens, so a corrupt block would fail its request; let the engine recompute (in vLLM: "
            '"kv_load_failure_policy":"recompute" in --kv-transfer-config), or set verify to \'off\''
        )
        raise ConfigError([problem])


def _shown(value: object) -> str:
    """Return a value's text for an error, shortened and without a URL's credentials."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # for numbers with too many digits, and deeply nested values
        return f"a {type(value).__name__} that is too large to show"
    text = re.sub(r"//.*@", "//...@", text)
    text = re.sub(r"(//.*?[?#]).*", r"\1...", text)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _nearest(name: object) -> str | None:
    """Return the valid key that an unknown key resembles most, or None."""
    if name in _RENAMED:
        return _RENAMED[name]
    known = [*SETTINGS, *ALIASES, *_TYPES_OF_VLLM]
    return next(iter(difflib.get_close_matches(_shown(name).strip("'"), known, n=1, cutoff=0.5)), None)


def _unknown(name: object) -> tuple[str | None, str]:
    """Return the valid key that replaces an unknown key, or None, and the error for the unknown key."""
    if found := find_counterpart(name):
        peer, row = found
        ours = f"set {row.setting}" if row.setting else "it has no counterpart"
        return row.setting or None, f"{_shown(name)} is a key of {peer}; {ours} ({row.note})"
    near = _nearest(name)
    hint = f"did you mean {near}?" if near else f"known keys: {', '.join(SETTINGS)}"
    return near, f"unknown key {_shown(name)}; {hint}"


def _as_path(_: type, value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise ValueError
    return Path(value)


class Setting(msgspec.Struct, frozen=True):
    """The description of one settings key.

    Args:
        type: the type to which `msgspec.convert` converts the key's value.
        allowed: the allowed values, as text.
        default: the default as text, or the effect of leaving the key out.
        meaning: what the key sets.
    """

    type: Any
    allowed: str
    default: str
    meaning: str


def _setting(field: msgspec.structs.FieldInfo) -> Setting:
    *limits, key = field.type.__metadata__
    # The type of a setting with a default of None is `kind | None`.
    kind = field.type if limits else get_args(field.type.__origin__)[0]
    if field.default in (None, msgspec.NODEFAULT):
        default = key.extra["unset"]
    else:
        default = size_text(field.default) if _is_size(kind) else msgspec.json.encode(field.default).decode()
    return Setting(kind, _allowed(kind), default.strip('"'), key.description)


def _is_size(kind: Any) -> bool:  # noqa: ANN401  # an annotated type
    return get_args(kind)[1] is get_args(Bytes)[1]


def _allowed(kind: Any) -> str:  # noqa: ANN401
    return str(get_args(kind)[1].title)


SETTINGS = {field.name: _setting(field) for field in msgspec.structs.fields(OffloadConfig)}
"""The settings by key."""

_TYPES_OF_VLLM: dict[str, Any] = {
    "lazy_offload": Switch,
    _BACKEND: Annotated[Literal["cpu"], Meta(title='"cpu": kvoffload keeps blocks in host memory')],
}
"""The types of vLLM's own keys that set nothing here, or that allow other values than our settings do."""
