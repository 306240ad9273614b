"""Reads kvoffload's settings from SGLang's `--hicache-storage-backend-extra-config`, without importing SGLang."""

from __future__ import annotations

from collections.abc import Mapping

from kvoffload.model.config import OffloadConfig
from kvoffload.model.errors import ConfigError

BACKEND: Mapping[str, object] = {
    "backend_name": "kvoffload",
    "module_path": "kvoffload_sglang.storage",
    "class_name": "KVOffloadStorage",
    "interface_v1": 1,
}
"""The part of the extra config by which SGLang finds kvoffload's storage backend."""

OPTION = "--hicache-storage-backend-extra-config"
_OF_SGLANG = {
    *BACKEND,
    "file_storage_path",
    "hicache_storage_pass_prefix_keys",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
}


def check_settings(extra: Mapping[str, object]) -> OffloadConfig:
    """Return the kvoffload settings in SGLang's extra config.

    Raises:
        ConfigError: a setting, the tier key or the remote tier's address is invalid. The message lists all problems.
    """
    # Every command imports the module `settings`, so its top imports only modules that load fast.
    from kvoffload.disk.tier_key import read_tier_key
    from kvoffload.remote.address import parse_address
    from kvoffload.tier_cache import tier_config

    problems: list[str] = []
    if not extra.get("interface_v1"):
        problems.append(f"interface_v1 is not set; set it to 1 in {OPTION}")
    try:
        config = tier_config({name: value for name, value in extra.items() if name not in _OF_SGLANG})
        read_tier_key(config.tier_key_file)
        if config.remote_url is not None:
            parse_address(config.remote_url)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    if problems:
        raise ConfigError(problems)
    return config
