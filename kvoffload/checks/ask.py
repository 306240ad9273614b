"""Asks an engine about its own command line, in a child process with a time limit.

Importing an engine takes seconds, and may crash, hang or print. The child imports the engine and answers with one JSON
object. Everything else that the child prints is dropped, except the last line if there is no answer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import metadata
from typing import Any

from kvoffload.checks.launch import Launch

LIMIT_S = 120.0
"""The time after which the child is killed. A stock vLLM took 6 to 14 seconds on two busy cores."""

_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
_LONGEST = 600  # the maximum number of characters of a text that an engine printed


def ask_engine(engine: str, launch: Launch, module: str, **more: object) -> dict[str, Any]:
    """Return what the engine of this environment says of a command line.

    If it cannot be asked, the keys "unknown" and "remedy" say why, and what to do.

    Args:
        engine: the engine's name; in lower case, it is the name of the engine's package.
        launch: the command line.
        module: the child's module, which calls `answer`.
        more: what the request contains besides the engine's arguments.
    """
    if launch.image:
        remedy = f"run the doctor in that image, which needs kvoffload: --entrypoint kvoffload {launch.image} doctor ..."
        return {"unknown": f"{engine} runs in the image {launch.image}", "remedy": remedy}
    try:
        metadata.version(engine.lower())
    except metadata.PackageNotFoundError:
        return {
            "unknown": f"{engine} is not installed in this environment",
            "remedy": f"run the doctor where {engine} is",
        }
    if launch.placeholders:
        return {
            "unknown": "the command line has variables",
            "remedy": "put their values into the command line",
        }
    reply = ask(module, {"arguments": launch.arguments, **more}, launch.whole_environ)
    return {"remedy": f"run the doctor where {engine} starts, with its model and device"} | reply


def ask(
    module: str, request: Mapping[str, object], environ: Mapping[str, str], *, limit_s: float = LIMIT_S
) -> dict[str, Any]:
    """Return a child's answer to a request. The child downloads nothing from the Hugging Face hub.

    Args:
        module: the child's module, which calls `answer`.
        request: the request; it becomes JSON.
        environ: the environment variables of the engine.
        limit_s: seconds to wait.

    Returns:
        the child's answer, or the reason why there is none, in the key "unknown".
    """
    if sys.stderr.isatty():
        sys.stderr.write("asking the engine, which takes some seconds ...\n")
    with subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**environ, **_OFFLINE},
        start_new_session=True,
    ) as child:
        try:
            out, err = child.communicate(json.dumps(request).encode(), timeout=limit_s)
        except subprocess.TimeoutExpired:
            return {"unknown": f"it does not answer within {limit_s:.0f} s"}
        finally:
            _end(child)
    try:
        found = json.loads(out)
    except ValueError:
        lines = err.decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "it prints nothing")
        return {"unknown": f"it ends with code {child.returncode}: {shortened(last)}"}
    return found if isinstance(found, dict) else {"unknown": "its answer is not an object"}


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and all processes that it started."""
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(child.pid, signal.SIGKILL)


def answer(find: Callable[[dict[str, Any]], Mapping[str, object]]) -> None:
    """Answer the parent's request in a child process, with what `find` returns for the request."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print to standard output
    request = json.load(sys.stdin)
    json.dump(find(request), out)
    out.close()


def words_of_exit(end: SystemExit, printed: str) -> str:
    """Return why an engine's parser ended the process, from what it printed to standard error."""
    return shortened(printed.rpartition("error: ")[2]) if end.code else "the line asks for help only"


def words_of(error: BaseException) -> str:
    """Return an engine's own words for an error, shortened and in one line."""
    listed = getattr(error, "errors", None)
    if callable(listed):  # pydantic's ValidationError
        parts = []
        for one in listed():
            place = ".".join(map(str, one.get("loc", ())))
            text = str(one["msg"]).removeprefix("Value error, ")
            parts.append(f"{place}: {text}" if place else text)
        return shortened("; ".join(parts))
    return shortened(str(error) or type(error).__name__)


def is_about_the_hub(error: BaseException | None) -> bool:
    """Return whether an error, or an error that caused it, comes from the Hugging Face hub, which is not asked."""
    while error is not None:
        if type(error).__module__.startswith("huggingface_hub") or "huggingface.co" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
