"""From the name of a template to the mounts and variables of a sandbox made from it."""

from __future__ import annotations

import json
import os
from dataclasses import replace

from ..errors import ImageNotFound, InvalidRequest
from ..images.reference import Reference, is_digest
from ..images.store import ImageStore, default_directory
from ..model.mount import READ_WRITE, Mount
from ..model.spec import SandboxSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..model.image import Image

VENV = "/opt/venv"
FONTS = "/opt/matplotlib"  # matplotlib's directory, with its list of fonts
COPIES = "ringfence.copies"  # label: JSON list of the targets of copies
NONE = "default"


def store_of() -> ImageStore:
    """Return the store of this user's templates, beside the images."""
    return ImageStore(os.path.join(default_directory(), "templates"))


def short_name(image: Image) -> str:
    """Return the name as `Sandbox.create(template=...)` takes it."""
    return image.reference.removeprefix("docker.io/library/").removesuffix(":latest")


def find(name: str, store: ImageStore) -> Image:
    """Find a built template by name or id.

    Raises:
        InvalidRequest: It is not in the store.
    """
    try:
        return store.find(name if is_digest(name) else str(Reference.parse(name)))
    except ImageNotFound:
        raise InvalidRequest(
            f"template {name!r} not found",
            field="template",
            hint="`ringfence template list` lists templates; Template.build(name) makes one",
        ) from None


def apply(spec: SandboxSpec, store: ImageStore | None = None) -> tuple[SandboxSpec, int]:
    """Add a template's mounts and variables to a spec; variables of the spec win.

    Returns:
        The spec without a template, and a descriptor that keeps the files until it is closed;
        -1 where the spec names no template.

    Raises:
        InvalidRequest: The template is not in the store, or the spec has another root or Python.
    """
    if spec.template == NONE:
        return spec, -1
    for other in ("image", "python_env"):
        if getattr(spec, other):
            raise InvalidRequest(
                "a template shows the host's programs and its own Python packages",
                field=other,
                hint="for an image use Template.from_image(...).build(name) and image=name",
            )
    store = store or store_of()
    image = find(spec.template, store)
    held = store.hold(image)
    try:
        mounts = (*_shown(image, os.path.realpath(store.root(image))), *spec.mounts)
        wanted = replace(spec, template=NONE, mounts=mounts, env={**image.env, **spec.env})
    except BaseException:
        os.close(held)
        raise
    return wanted, held


def _shown(image: Image, root: str) -> tuple[Mount, ...]:
    """The mounts of a template's files, which are below `root`."""
    targets = [VENV, *json.loads(image.labels.get(COPIES, "[]"))]
    shown = tuple(
        Mount(target, root + target) for target in targets if os.path.lexists(root + target)
    )
    if os.path.isdir(root + FONTS):
        # Without a directory that it may write to, matplotlib warns and lists the fonts anew.
        lists = [f"{FONTS}/{name}" for name in sorted(os.listdir(root + FONTS))]
        shown += (Mount(FONTS, "", READ_WRITE, protect=()),)
        shown += tuple(Mount(each, root + each) for each in lists)
    return shown
