"""Reading and writing files: what is read is checked, what is written is whole."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

_RECOGNIZED = 48  # characters of a name by which people know its temporary file


@contextlib.contextmanager
def written(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """A text file to write into; what was at ``path`` stays whole until this is.

    It has a temporary name beside ``path``, and is renamed if nothing went wrong.
    A link stays one; what is no file, or a file that is open already (a pipe,
    ``/dev/stdout``), is written to as it is.

    Raises:
      OSError: naming ``path``, if it cannot be written.
    """
    check_writable(path)
    try:
        with _replacing(path) if is_replaced(path) else _going_on(path) as file:
            yield file
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


@contextlib.contextmanager
def _replacing(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    path = Path(os.path.realpath(path))
    beginning = f".{path.name[:_RECOGNIZED]}."  # together it must not be too long for a name
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=beginning, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            yield file
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes it private
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@contextlib.contextmanager
def _going_on(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    descriptor = _open_already(path)
    if descriptor is not None:
        target: int | str | os.PathLike[str] = os.dup(descriptor)
    else:
        target = _open_pipe(path) if Path(path).is_fifo() else path
    with open(target, "w", encoding="utf-8", newline="") as file:
        yield file


def _open_pipe(path: str | os.PathLike[str]) -> int:
    """A descriptor for a named pipe; who has to wait for its other end is told so."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        warnings.warn(f"{path} is a pipe that nobody reads yet; waiting for a reader", stacklevel=2)
        return os.open(path, os.O_WRONLY)
    os.set_blocking(descriptor, True)
    return descriptor


def is_standard_output(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is ``/dev/stdout``, or a name for that."""
    return _open_already(path) == 1


def is_replaced(path: str | os.PathLike[str]) -> bool:
    """Whether ``written`` replaces what is at ``path``, and does not go on writing there."""
    there = os.path.exists(path) and not os.path.isfile(path)
    return not there and _open_already(path) is None


def _open_already(path: str | os.PathLike[str]) -> int | None:
    """The descriptor that a path such as ``/dev/stdout`` stands for."""
    path = os.path.abspath(path)
    for _ in range(8):  # links to links
        match = re.fullmatch(r"/(?:dev|proc/self)/fd/(\d+)", path)
        if match:
            return int(match[1])
        if not os.path.islink(path):
            return None
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
    return None


def check_writable(path: str | os.PathLike[str]) -> None:
    """Checks early what can be known of a file that is written late.

    Raises:
      OSError: naming ``path``, if it is a folder, its folder is not there, or its name
        is too long.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.stat(path)  # raises where no file could have that name
    if os.path.islink(path) and _open_already(path) is None:
        path = os.path.realpath(path)  # it may be to what is not there yet
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK) and (path.is_file() or not path.exists()):
        raise PermissionError(f"{path} cannot be written: {path.parent} is not yours to write to")


def write_json(document: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes a JSON file."""
    with written(path) as file:
        json.dump(document, file, allow_nan=False)
        file.write("\n")


def read_json(path: str | os.PathLike[str], error: type[ValueError]) -> Any:
    """Reads a JSON file.

    Raises:
      error: naming the file, if it is not one.
      OSError: if it cannot be read.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise error(f"{path}: {twice!r} is there twice; which of them counts is not clear")
        return found

    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        return json.loads(text, object_pairs_hook=once)
    except error:
        raise
    except UnicodeDecodeError as problem:
        raise error(f"{path}: not a text file ({problem})") from None
    except (ValueError, RecursionError) as problem:
        raise error(f"{path}: not valid JSON ({problem}); is the file truncated?") from None
