"""images: an image's layers unpacked, beside `tar x`; and what a second sandbox adds, also of a template."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import tarfile
import tempfile
from contextlib import contextmanager

from ...images.config import architecture
from ...images.store import ImageStore
from ...images.unpack import Layer, unpack
from ...sandbox import Sandbox
from ...sandbox.template import Template
from ..rows import VALUE, Missing, Row, Target
from ..turns import OURS, take_turns
from .files import place_for, timed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from ..settings import Settings

_TAR = "tar x"
_UNPACK = Target(must=1.3, aim=1.0)
_NO_COPY = Target(VALUE, must=0)
_IN_A_DIRECTORY = 40  # files
_SCALE, _SPREAD = (
    9.0,
    1.7,
)  # of the logarithm of a file's bytes: as in /usr, many small and few large
_MOST = 32 << 20
_TEMPLATE_MIB, _TRIES = 64, 3


def measure(settings: Settings) -> Iterator[Row | Missing]:
    """The same layer, its digest checked, plain and compressed; then two sandboxes of it."""
    size = settings.image_bytes
    with tempfile.TemporaryDirectory(prefix="ringfence-bench-", dir=place_for(size)) as directory:
        plain = f"{directory}/layer.tar"
        layer = Layer(plain, _make(plain, size))
        if shutil.which("tar") and shutil.which("gzip"):
            subprocess.run(["gzip", "-k", "-6", plain], check=True)
            packed = Layer(f"{plain}.gz", layer.diff_id)
            for each, kind in ((layer, "plain"), (packed, "gzip")):
                yield _row(kind, size, each, directory, settings.file_rounds)
            os.unlink(packed.path)
        else:
            yield Missing(_TAR, "not installed")
        yield _second(layer, directory)
        yield from _second_of_template(directory)


def _row(kind: str, size: int, layer: Layer, directory: str, rounds: int) -> Row:
    target = f"{directory}/root"

    def ours() -> float:
        os.mkdir(target)
        return timed(lambda: unpack([layer], target), lambda: shutil.rmtree(target))

    def theirs() -> float:
        os.mkdir(target)
        command = ["tar", "-xf", layer.path, "-C", target]
        return timed(lambda: subprocess.run(command, check=True), lambda: shutil.rmtree(target))

    samples = take_turns({OURS: ours, _TAR: theirs}, rounds, warm_up=1)
    what = f"an image of {size >> 20} MiB unpacked, {kind}"
    found = samples.median_ms(OURS), samples.median_ms(_TAR)
    note = samples.failed.get(_TAR, "")
    return Row("images", what, "ms", found[0], _TAR, found[1], _UNPACK, rounds, note)


@contextmanager
def _images_in(directory: str) -> Iterator[None]:
    before = os.environ.get("RINGFENCE_IMAGES")
    os.environ["RINGFENCE_IMAGES"] = directory
    try:
        yield
    finally:
        os.environ.pop("RINGFENCE_IMAGES")
        if before is not None:
            os.environ["RINGFENCE_IMAGES"] = before


def _second(layer: Layer, directory: str) -> Row:
    """KiB that a second sandbox adds where images are kept."""
    with _images_in(f"{directory}/images"):
        told = {"architecture": architecture(), "rootfs": {"diff_ids": [layer.diff_id]}}
        ImageStore().add("bench", json.dumps(told).encode(), [layer])
        with Sandbox.create(image="bench") as one:
            one.files.write("/tmp/one", b"1")
            alone = _disk_usage(f"{directory}/images")
            with Sandbox.create(image="bench") as two:
                two.files.write("/tmp/two", b"2")
                both = _disk_usage(f"{directory}/images")
    what = f"a second sandbox of an image of {alone >> 20} MiB: more disk"
    return Row("images", what, "KiB", (both - alone) / 1024, target=_NO_COPY)


def _second_of_template(directory: str) -> Iterator[Row]:
    """Measure disk and memory that a second sandbox adds, which reads all files of a template.

    Memory is the page cache of the whole host, in whole MiB: the least of some tries, less the least
    of sandboxes without a template.
    """
    store, source = f"{directory}/templates", f"{directory}/files"
    os.mkdir(source)
    with open(f"{source}/data", "wb") as file:
        file.writelines(os.urandom(1 << 20) for _ in range(_TEMPLATE_MIB))
    with _images_in(store):
        Template.from_host().copy(source, "/data").build("bench")
        with _reading() as one:
            alone = _disk_usage(store)
            more = min(_cached_by(_reading) for _ in range(_TRIES))
            more -= max(0, min(_cached_by(_empty) for _ in range(_TRIES)))
            both = _disk_usage(store)
            if not one.exec(["true"]).ok:
                raise AssertionError("the first sandbox of a template has ended")
    what = f"a second sandbox of a built template of {_TEMPLATE_MIB} MiB: more"
    disk = (both - alone) / 1024
    yield Row("images", f"{what} disk", "KiB", disk, target=_NO_COPY, samples=_TRIES)
    memory = max(0, more) >> 20
    yield Row("images", f"{what} memory", "MiB", memory, target=_NO_COPY, samples=_TRIES)


@contextmanager
def _reading() -> Iterator[Sandbox]:
    with Sandbox.create(template="bench") as sandbox:
        result = sandbox.exec(["sh", "-c", "cat /data/data | wc -c"])
        if result.stdout.strip() != b"%d" % (_TEMPLATE_MIB << 20):
            raise AssertionError(f"the template was not read: {result}")
        yield sandbox


@contextmanager
def _empty() -> Iterator[Sandbox]:
    with Sandbox.create() as sandbox:
        sandbox.exec(["true"])
        yield sandbox


def _cached_by(make: Callable[[], AbstractContextManager[Sandbox]]) -> int:
    before = _cached()
    with make():
        return _cached() - before


def _cached() -> int:
    """Bytes of files and of shared memory that the kernel holds."""
    with open("/proc/meminfo", encoding="ascii") as file:
        sizes = {name: int(rest.split()[0]) << 10 for name, rest in (x.split(":") for x in file)}
    return sizes["Cached"] + sizes["Buffers"]


def _disk_usage(directory: str) -> int:
    """Bytes that all files take; one with several names once."""
    seen: dict[tuple[int, int], int] = {}
    for here, directories, names in os.walk(directory):
        for name in [*directories, *names]:
            info = os.lstat(os.path.join(here, name))
            seen[info.st_dev, info.st_ino] = info.st_blocks * 512
    return sum(seen.values())


def _make(path: str, size: int) -> str:
    """Write a layer of files as real ones are, the same each time; its digest."""
    chance = random.Random(1)
    stuff = chance.randbytes(1 << 20)
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        written = number = 0
        while written < size:
            count = min(int(chance.lognormvariate(_SCALE, _SPREAD)), _MOST, size - written)
            directory = f"usr/lib/d{number // _IN_A_DIRECTORY}"
            if number % _IN_A_DIRECTORY == 0:
                made = tarfile.TarInfo(directory)
                made.type, made.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(made)
            member = tarfile.TarInfo(f"{directory}/file{number}")
            member.size = count
            tar.addfile(member, io.BytesIO((stuff * (count // len(stuff) + 1))[:count]))
            written, number = written + count, number + 1
    with open(path, "rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
