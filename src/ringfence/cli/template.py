"""`ringfence template`, and the packages of `ringfence run --pip`."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..environments.apply import find, short_name, store_of
from ..errors import InvalidRequest
from ..sandbox.template import Template
from .commands import TEMPLATE
from .image import parse_all, print_table, text_of_age, text_of_size
from .options import verb_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..model.image import Image
    from ..model.spec import SandboxSpec


def main(argv: Sequence[str]) -> int:
    """Do one verb; options may stand before it or after."""
    given, rest = parse_all(TEMPLATE, argv)
    if "help" in given:
        from .help import help_of

        sys.stdout.write(help_of(TEMPLATE))
        return 0
    verb, arguments = verb_of(TEMPLATE, rest), rest[1:]
    count, act = _VERBS[verb]
    if len(arguments) < count:
        hint = f"ringfence template {TEMPLATE.arguments}"
        raise InvalidRequest("is missing", field="NAME", hint=hint)
    if len(arguments) > count:
        extra = arguments[count]
        hint = f"did you mean --pip {extra}?" if verb == "build" else f"remove {extra!r}"
        raise InvalidRequest(f"unexpected argument {extra!r}", field="ARGUMENT", hint=hint)
    return act(given, arguments)


def with_packages(spec: SandboxSpec, packages: Sequence[str]) -> SandboxSpec:
    """Build the template of these packages, unless it is known; the spec that names it.

    Raises:
        InvalidRequest: The spec names a template or an image besides.
        ExecError: pip failed.
    """
    if spec.template != "default" or spec.image is not None:
        field = "image" if spec.image is not None else "template"
        raise InvalidRequest(
            "--pip makes a template of its own",
            field=field,
            hint="build one with all packages: ringfence template build NAME --pip PACKAGE",
        )
    image = Template.from_host().pip_install(*packages).build(on_output=_show)
    return replace(spec, template=image.id)


def _show(data: bytes) -> None:
    sys.stderr.buffer.write(data)
    sys.stderr.buffer.flush()


def _build(given: dict[str, Any], arguments: Sequence[str]) -> int:
    template = Template.from_host().pip_install(
        *given.get("pip", ()),
        index_url=given.get("index-url"),
        find_links=given.get("find-links"),
    )
    image = template.build(arguments[0], on_output=_show)
    print(json.dumps(_form(image)) if "json" in given else f"built {short_name(image)}")
    return 0


def _list(given: dict[str, Any], _arguments: Sequence[str]) -> int:
    images = store_of().images()
    if "json" in given:
        print(json.dumps([_form(image) for image in images]))
        return 0
    rows = [("NAME", "ID", "SIZE", "AGE")]
    for image in images:
        age = text_of_age(time.time() - image.created_at)
        rows.append((short_name(image), image.id[7:19], text_of_size(image.size_bytes), age))
    print_table(rows)
    return 0


def _remove(given: dict[str, Any], arguments: Sequence[str]) -> int:
    find(arguments[0], store_of())
    image = store_of().remove(arguments[0])
    name = short_name(image)
    hint = "`ringfence template prune` frees its files"
    print(json.dumps({"removed": name}) if "json" in given else f"removed {name}; {hint}")
    return 0


def _prune(given: dict[str, Any], _arguments: Sequence[str]) -> int:
    freed, in_use = store_of().collect()
    if "json" in given:
        print(json.dumps({"freed_bytes": freed, "in_use": in_use}))
    else:
        print(f"freed {text_of_size(freed)}; {len(in_use)} in use")
    return 0


def _form(image: Image) -> dict[str, Any]:
    return {
        "name": short_name(image),
        "id": image.id,
        "size_bytes": image.size_bytes,
        "created_at": image.created_at,
    }


_VERBS = {"build": (1, _build), "list": (0, _list), "remove": (1, _remove), "prune": (0, _prune)}
