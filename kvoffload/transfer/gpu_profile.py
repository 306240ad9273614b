"""How the page kernel is best used on one card, as `kvoffload gpu-check` measured it there.

    ~/.cache/kvoffload/nvidia-h100-80gb-hbm3-cuda-13-0.json     {"programs": 12, "fewest": 32, "stores": false}

Each card with each driver has a file of its own. Without one the values here hold, which were chosen without a device.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import msgspec

from kvoffload.logs import get_logger

log = get_logger("transfer")

_Count = Annotated[int, msgspec.Meta(ge=1, le=1024)]


class GpuProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the page kernel is used.

    Args:
        programs: thread blocks of a launch. 32 have 128 KiB under way, about twice what a bus of 50 GB/s and 1.2 us holds.
        fewest: short copies in a batch from which on a launch is worth it.
        stores: whether stores use the kernel; its thread blocks take processors from the forward pass.
    """

    programs: _Count = 32
    fewest: _Count = 16
    stores: bool = True


def profile_path(gpu: str, cuda: str) -> Path:
    """Return where the profile of a card is kept: in `XDG_CACHE_HOME`, or else in the user's `.cache`.

    Args:
        gpu: the card's name.
        cuda: the newest CUDA that its driver knows.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = re.sub("[^a-z0-9]+", "-", f"{gpu} cuda {cuda}".lower())
    return Path(cache, "kvoffload", f"{name}.json")


def read_profile(gpu: str, cuda: str) -> GpuProfile:
    """Return the profile of a card, the one without measurements where there is no file. A bad file is one warning."""
    path = profile_path(gpu, cuda)
    try:
        return msgspec.json.decode(path.read_bytes(), type=GpuProfile)
    except FileNotFoundError:
        pass
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("gpu_profile_ignored", path=str(path), reason=str(error))
    return GpuProfile()
