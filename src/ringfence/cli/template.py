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
from .server.remote import client_of

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


def with_packages(spec: SandboxSpec, packages: Sequence[str], *, shows_output: bool) -> SandboxSpec:
    """Build the template of these packages, unless it is known; the spec that names it.

    Args:
        shows_output: Prints what pip prints; otherwise the error has its end.

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
    on_output = _show if shows_output else None
    image = Template.from_host().pip_install(*packages).build(on_output=on_output)
    return replace(spec, template=image.id)


def _show(data: bytes) -> None:
    sys.stderr.buffer.write(data)
    sys.stderr.buffer.flush()


def _build(given: dict[str, Any], arguments: Sequence[str]) -> int:
    template = Template.from_host()
    for each in given.get("copy", ()):
        source, colon, target = each.rpartition(":")
        if not colon or not source:
            raise InvalidRequest(f"{each!r} has no target", field="copy", hint="as data:/srv/data")
        template = template.copy(source, target)
    if packages := given.get("pip", ()):
        index, links = given.get("index-url"), given.get("find-links")
        template = template.pip_install(*packages, index_url=index, find_links=links)
    for script in given.get("run", ()):
        template = template.run(script)
    if not template._plan:
        raise InvalidRequest(
            "no step given", field="pip", hint="add --pip PACKAGE, --copy or --run"
        )
    if "server" in given:
        with client_of(given) as client:
            view = template.build(arguments[0], on_output=_show, server=client)
        print(json.dumps(view.to_json()) if "json" in given else f"built {view.name}")
        return 0
    image = template.build(arguments[0], on_output=_show)
    print(json.dumps(_form(image)) if "json" in given else f"built {short_name(image)}")
    return 0


def _list_of_server(given: dict[str, Any]) -> int:
    with client_of(given) as client:
        views = client.templates.list()
    if "json" in given:
        print(json.dumps([each.to_json() for each in views]))
        return 0
    rows = [("NAME", "OWNER", "STATUS", "SIZE", "AGE")]
    for each in views:
        age = text_of_age(time.time() - each.updated_at)
        owner = f"{each.owner} (public)" if each.public else each.owner
        rows.append((each.name, owner, each.status, text_of_size(each.size_bytes), age))
    print_table(rows)
    return 0


def _list(given: dict[str, Any], _arguments: Sequence[str]) -> int:
    if "server" in given:
        return _list_of_server(given)
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
    if "server" in given:
        with client_of(given) as client:
            client.templates.delete(arguments[0])
        form = {"removed": arguments[0]}
        print(json.dumps(form) if "json" in given else f"removed {arguments[0]}")
        return 0
    find(arguments[0], store_of())
    image = store_of().remove(arguments[0])
    name = short_name(image)
    hint = "`ringfence template prune` frees its files"
    print(json.dumps({"removed": name}) if "json" in given else f"removed {name}; {hint}")
    return 0


def _prune(given: dict[str, Any], _arguments: Sequence[str]) -> int:
    if "server" in given:
        raise InvalidRequest("a server prunes by itself", field="server", hint="omit --server")
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
