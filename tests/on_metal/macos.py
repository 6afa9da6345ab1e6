"""Makes this process look like one on macOS to deltatune, on Linux.

`declare()` takes away what macOS lacks in os, signal, resource, fcntl and mmap, hides /proc, /sys and /dev/shm from
deltatune, gives it "darwin" for sys.platform, adds macOS's own commands of fcntl and functions of libSystem
(macos.cpp), counts ru_maxrss in bytes and allows 256 open files, as launchd does. Other packages run on as on Linux.
"""

import builtins
import ctypes
import fcntl
import mmap
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from marks import Finder

MISSING = {
    os: "posix_fadvise posix_fallocate sched_getaffinity sched_setaffinity sched_getscheduler memfd_create eventfd "
    "pidfd_open copy_file_range splice getrandom fdatasync pipe2 setresuid getresuid unshare O_DIRECT O_TMPFILE "
    "O_NOATIME O_PATH POSIX_FADV_DONTNEED POSIX_FADV_WILLNEED POSIX_FADV_SEQUENTIAL MFD_CLOEXEC",
    resource: "prlimit RLIMIT_SIGPENDING RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_RTPRIO RUSAGE_THREAD",
    signal: "SIGRTMIN SIGRTMAX SIGPOLL SIGPWR SIGSTKFLT sigtimedwait sigwaitinfo pidfd_send_signal",
    fcntl: "F_ADD_SEALS F_GET_SEALS F_SETPIPE_SZ F_GETPIPE_SZ F_NOTIFY F_SETLEASE",
    mmap: "MAP_POPULATE MAP_STACK MADV_DONTFORK MADV_HUGEPAGE MADV_REMOVE",
}
HIDDEN = ("/proc", "/sys", "/dev/shm")
# Commands of fcntl: nobody caches a file, one descriptor does not, and the drive's own memory is written out.
GLOBAL_NOCACHE, NOCACHE, FULLFSYNC = 55, 48, 51
OPEN_FILES = 256
_NAME = b"__platform__"
PACKAGE, TESTS = f"{os.sep}src{os.sep}deltatune{os.sep}", f"{os.sep}tests{os.sep}"


def declare(folder: Path) -> None:
    """Make this process look like one on macOS, before anything of deltatune is imported; compile into `folder`."""
    for module, names in MISSING.items():
        for name in names.split():
            vars(module).pop(name, None)
    tempfile._O_TMPFILE_WORKS = False
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    _platform()
    _usage_in_bytes()
    _commands_of_fcntl()
    _libraries(_built(folder))
    setattr(builtins, _NAME.decode(), "darwin")
    asks = lambda path: b"sys.platform" in Path(path).read_bytes()  # noqa: E731
    sys.meta_path.insert(0, Finder(asks, lambda path, text: text.replace(b"sys.platform", _NAME)))
    sys.addaudithook(_hide)


def _platform() -> None:
    """Tell deltatune alone that the system is macOS: other packages would look for its libraries."""
    answers = {"system": "Darwin", "machine": "arm64", "mac_ver": ("26.1", ("", "", ""), "arm64")}

    def told(plain: Callable[..., Any], answer: Any, *given: Any) -> Any:
        return answer if PACKAGE in sys._getframe(1).f_code.co_filename else plain(*given)

    for name, answer in answers.items():
        setattr(platform, name, partial(told, getattr(platform, name), answer))


def _usage_in_bytes() -> None:
    plain = resource.getrusage

    def getrusage(who: int) -> resource.struct_rusage:
        usage = list(plain(who))
        usage[2] *= 1024
        return resource.struct_rusage(usage)

    resource.getrusage = getrusage


def _commands_of_fcntl() -> None:
    plain, fcntl.F_FULLFSYNC = fcntl.fcntl, FULLFSYNC

    def call(descriptor: Any, command: int, value: Any = 0) -> Any:
        if command == FULLFSYNC:
            os.fsync(descriptor)
        return 0 if command in (GLOBAL_NOCACHE, NOCACHE, FULLFSYNC) else plain(descriptor, command, value)

    fcntl.fcntl = call


def _built(folder: Path) -> Path:
    made, library = folder / f"macos.{os.getpid()}.so", folder / "macos.so"
    source = Path(__file__).with_name("macos.cpp")
    subprocess.run(["g++", "-O1", "-fPIC", "-shared", str(source), "-o", str(made)], check=True)
    os.replace(made, library)
    return library


def _libraries(system: Path) -> None:
    """Give macOS's libraries by their names, and deltatune none that has one of Linux's."""
    plain, others = ctypes.CDLL, ("libc.so", "libm.so", "libcuda", "libnv")
    # OpenBLAS, as deltatune has prepared it, stands in for Apple's BLAS.
    prepared = next((Path(os.environ["DELTATUNE_CACHE"]) / "blas").glob("libopenblas-*.so"))
    accelerate = "/System/Library/Frameworks/Accelerate.framework/Accelerate"
    theirs = {"/usr/lib/libSystem.B.dylib": str(system), accelerate: str(prepared)}

    class CDLL(plain):
        def __init__(self, name: Any, *arguments: Any, **options: Any) -> None:
            if isinstance(name, str) and name.startswith(others) and PACKAGE in sys._getframe(1).f_code.co_filename:
                raise OSError(f"dlopen({name}, 0x0006): tried: '{name}' (no such file)")
            super().__init__(theirs.get(name, name), *arguments, **options)

    ctypes.CDLL = CDLL


def _hide(event: str, arguments: tuple[Any, ...]) -> None:
    """Keep deltatune from files that only Linux has."""
    if event not in ("open", "os.listdir", "os.scandir") or not isinstance(arguments[0], str | bytes):
        return
    path, frame = os.fsdecode(arguments[0]), sys._getframe(1)
    # Between the caller and this function are those of Python's own library.
    while path.startswith(HIDDEN) and frame is not None and TESTS not in frame.f_code.co_filename:
        if PACKAGE in frame.f_code.co_filename:
            raise FileNotFoundError(2, "No such file or directory", path)
        frame = frame.f_back
