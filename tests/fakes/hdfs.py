"""A fake of hdfs-native's client over a directory, with the errors that the library makes of a NameNode's.

Every request is in `asked`. A request can be made to fail, before or after it is carried out.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def rpc_error(name: str, said: str = "refused") -> RuntimeError:
    """Return the error for an exception of the NameNode that the library has no type for."""
    return RuntimeError(
        f'RPCError("org.apache.hadoop.{name}", "{said}\\n\\tat java.base/X.java:1")'
    )


LOST = OSError("Connection reset by peer (os error 104)")


class NameNode:
    """The files of a fake HDFS, and a client for them."""

    url = "hdfs://namenode:8020"

    def __init__(self, root: Path) -> None:
        self.root = root
        self.asked: list[str] = []
        self._faults: list[tuple[str, Exception, bool]] = []
        self._lock = threading.Lock()

    def fail(self, request: str, error: Exception, *, after: bool = False) -> None:
        """Make the next such request fail; with `after`, it is carried out, and only its answer is lost."""
        self._faults.append((request, error, after))

    def __call__(self, url: str, config: dict[str, str]) -> "NameNode":
        """Connect, as the library's `Client` does."""
        assert url == self.url
        assert all(isinstance(value, str) for value in config.values())
        return self

    def get_file_info(self, path: str) -> Any:
        return self._carry_out("get_file_info", lambda: self._status(self._existing(path)))

    def list_status(self, path: str, recursive: bool = False) -> Iterator[Any]:
        top = self._carry_out("list_status", lambda: self._existing(path))
        found = top.rglob("*") if recursive else top.glob("*")
        return map(self._status, [top] if top.is_file() else found)

    def read(self, path: str) -> "_Reader":
        return self._carry_out("read", lambda: _Reader(self._existing(path).read_bytes()))

    def create(self, path: str, write_options: Any) -> "_Writer":
        def create() -> _Writer:
            target = self._local(path)
            if write_options.create_parent:
                target.parent.mkdir(parents=True, exist_ok=True)
            target.touch(exist_ok=write_options.overwrite)
            return _Writer(self, target)

        return self._carry_out("create", create)

    def rename(self, path: str, target: str, overwrite: bool = False) -> None:
        def rename() -> None:
            with self._lock:
                if not self._local(path).exists():
                    raise FileNotFoundError(f"rename source {path} is not found.")
                if self._local(target).exists() and not overwrite:
                    raise FileExistsError(f"rename destination {target} already exists")
                self._local(path).rename(self._local(target))

        self._carry_out("rename", rename)

    def delete(self, path: str, recursive: bool = False) -> bool:
        def delete() -> bool:
            is_there = self._local(path).exists()
            self._local(path).unlink(missing_ok=True)
            return is_there

        return self._carry_out("delete", delete)

    def _carry_out(self, request: str, act: Callable[[], Any]) -> Any:
        self.asked.append(request)
        fault = next((one for one in self._faults if one[0] == request), None)
        if fault is None:
            return act()
        self._faults.remove(fault)
        if fault[2]:
            act()
        raise fault[1]

    def _local(self, path: str) -> Path:
        assert path.startswith("/")
        assert "//" not in path
        return self.root / path[1:]

    def _existing(self, path: str) -> Path:
        if not self._local(path).exists():
            raise FileNotFoundError(path)
        return self._local(path)

    def _status(self, path: Path) -> Any:
        found = path.stat()
        return SimpleNamespace(
            path=f"/{path.relative_to(self.root)}",
            length=0 if path.is_dir() else found.st_size,
            isdir=path.is_dir(),
            modification_time=int(found.st_mtime * 1000),
        )


class _Reader:
    def __init__(self, content: bytes) -> None:
        self._content = content

    def __len__(self) -> int:
        return len(self._content)

    def read(self, size: int = -1) -> bytes:
        return self._content if size < 0 else self._content[:size]

    def read_range(self, offset: int, size: int) -> bytes:
        # The library panics, and no `except Exception` catches that.
        assert offset + size <= len(self._content), "Cannot read past end of the file"
        return self._content[offset : offset + size]


class _Writer:
    def __init__(self, namenode: NameNode, path: Path) -> None:
        self._namenode, self._path = namenode, path

    def write(self, some: bytes) -> int:
        def write() -> int:
            with self._path.open("ab") as file:
                return file.write(some)

        return self._namenode._carry_out("write", write)

    def hsync(self) -> None:
        self._namenode._carry_out("hsync", lambda: None)

    def close(self) -> None:
        self._namenode._carry_out("close", lambda: None)
