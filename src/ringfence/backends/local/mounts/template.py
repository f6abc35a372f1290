"""The default template: what a new sandbox's root looks like. Pure: it reads the host, changes nothing."""

from __future__ import annotations

import marshal
import os
import stat
import sys

from ....linux import mounts
from ....model.mount import MEMORY_DIR, OUTPUTS_DIR
from ..host import identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ....launcher.plan import Tree

    Steps = list[tuple[Any, ...]]

HOME = "/home/sandbox"
HOSTNAME = "ringfence"
_HOSTS = "127.0.0.1 localhost {}\n::1 localhost ip6-localhost\n"
_NAMES = "/opt/ringfence"
PATH = f"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:{_NAMES}"
READ_ONLY = mounts.MOUNT_ATTR_RDONLY | mounts.MOUNT_ATTR_NOSUID | mounts.MOUNT_ATTR_NODEV
# Read-only also on device nodes: it does not stop writing to the device, only changing the node.
DEVICE = mounts.MOUNT_ATTR_RDONLY | mounts.MOUNT_ATTR_NOSUID | mounts.MOUNT_ATTR_NOEXEC
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")

_USR_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
# Files of /etc that programs in /usr need and that reveal no users or secrets of the host.
_ETC_SHOWN = (
    "ImageMagick-6",
    "ImageMagick-7",
    "R/Renviron",
    "R/ldpaths",
    "alternatives",
    "chromium.d",
    "crypto-policies",
    "fonts",
    "java-11-openjdk",
    "java-17-openjdk",
    "java-21-openjdk",
    "java-25-openjdk",
    "ld.so.cache",
    "pki",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
)
# Of moby's list, what /proc may have; all of /proc is read-only besides.
_MASKED = (
    "acpi",
    "asound",
    "interrupts",
    "kcore",
    "keys",
    "latency_stats",
    "sched_debug",
    "scsi",
    "timer_list",
)
# What only root may open, who may be the caller where a /proc is the caller's.
NOT_OF_USERS = ("kpagecount", "kpageflags", "kpagecgroup")

# Scripts and models say it by habit. A set-user-id program could do nothing here.
_SUDO = b"""#!/bin/sh
# Nobody gains rights in a sandbox: the command runs as the user who asks for it.
while :; do
  case ${1-} in -[CDRTUghpru]) shift 2 ;; --) shift; break ;; -*) shift ;; *) break ;; esac
done
[ $# -gt 0 ] || { echo "usage: sudo COMMAND" >&2; exit 1; }
exec env "$@"
"""

# Where programs may create files; everything else is read-only to Landlock too.
WRITABLE = ("/home", "/tmp", "/var", "/mnt", "/run", "/root", "/dev/shm")

_LAYOUT: Steps = [
    ("dir", "/home", 0o755, False),
    ("dir", HOME, 0o755, True),
    ("dir", "/tmp", 0o1777, False),
    ("dir", "/var", 0o755, False),
    ("dir", "/var/tmp", 0o1777, False),
    ("dir", "/mnt", 0o755, False),
    ("dir", MEMORY_DIR, 0o755, True),
    ("dir", "/mnt/session", 0o755, False),
    ("dir", OUTPUTS_DIR, 0o755, True),
    ("dir", "/run", 0o755, False),
    ("dir", "/root", 0o711, False),  # a Python kept there must be reachable
    ("dir", "/etc", 0o755, False),
    ("dir", "/etc/R", 0o755, False),  # not its `*.site`, which may have an administrator's secrets
    ("dir", "/etc/ssl", 0o755, False),
    ("dir", "/dev", 0o755, False),
    ("dir", "/dev/shm", 0o1777, False),
    ("dir", "/dev/empty", 0o555, False),
    ("symlink", "/dev/fd", "/proc/self/fd"),
    ("symlink", "/dev/stdin", "/proc/self/fd/0"),
    ("symlink", "/dev/stdout", "/proc/self/fd/1"),
    ("symlink", "/dev/stderr", "/proc/self/fd/2"),
    ("symlink", "/etc/mtab", "/proc/self/mounts"),
    ("symlink", "/etc/os-release", "/usr/lib/os-release"),
]


def packed(uid: int, *, python_env: bool) -> bytes:
    """Every step of the root before any mount of the user's, and the trees that they show: marshalled.

    The host's layout does not change under a running process; its files are opened afresh each time.
    """
    key = uid, python_env
    if key not in _packed:
        _packed[key] = marshal.dumps(_root(uid, python_environment() if python_env else []))
    return _packed[key]


_packed: dict[tuple[int, bool], bytes] = {}


def packed_for_image(uid: int) -> bytes:
    """The same for a root whose files are an image's: what every program needs besides them."""
    if uid not in _packed_for_image:
        _packed_for_image[uid] = marshal.dumps(image_root(uid))
    return _packed_for_image[uid]


_packed_for_image: dict[int, bytes] = {}
_REPLACED = ("hosts", "hostname", "resolv.conf")


def packed_for_layers(uid: int, *, python_env: bool) -> bytes:
    """The same for a root whose files are those of snapshots of such roots."""
    key = uid, python_env
    if key not in _packed_for_layers:
        environment = python_environment() if python_env else []
        _packed_for_layers[key] = marshal.dumps(_layered_root(uid, environment))
    return _packed_for_layers[key]


_packed_for_layers: dict[tuple[int, bool], bytes] = {}


def _layered_root(uid: int, environment: list[tuple[str, str, int]]) -> tuple[list[Tree], Steps]:
    """Plan what `_root` plans, where most of it is there already, from within it."""
    trees, steps = image_root(uid)
    made = [*_LAYOUT, *links()]
    steps += [("image_dir", *args) for verb, *args in made if verb == "dir" and _is_plain(args[0])]
    steps += [
        ("image_link", *args) for verb, *args in made if verb == "symlink" and _is_plain(args[0])
    ]
    steps += [("image_file", *args, True) for verb, *args in made if verb == "file"]
    for source, target, attributes in [*shown(), *environment]:
        if _is_plain(target):
            steps.append(("bind", target, len(trees)))
            trees.append(tree(source, attributes))
    return trees, steps


def _is_plain(path: str) -> bool:
    return not path.startswith("/dev")


def image_root(uid: int, *, first: int = 0) -> tuple[list[Tree], Steps]:
    """The trees and steps that furnish an image's root, from within it.

    Args:
        first: The number of the first of these trees among all.
    """
    steps: Steps = [("image_dir", "/dev", 0o755, False), ("image_dev",)]
    # In a /dev that is new.
    steps += [step for step in _LAYOUT if step[1].startswith("/dev/")]
    steps += _image_layout(uid)
    trees: list[Tree] = []
    for name in _DEVICES:
        steps.append(("show", f"/dev/{name}", first + len(trees), False))
        trees.append(tree(f"/dev/{name}", DEVICE))
    rest = [step for step in after_binds() if step[0] != "proc"]
    return trees, [*steps, ("image_proc",), ("boot_id",), *rest]


def _image_layout(uid: int) -> Steps:
    """Plan the files that an image's root must have, whether the image has them or not."""
    steps: Steps = [
        ("image_dir", *args)
        for verb, *args in _LAYOUT
        if verb == "dir"
        and args[0] not in (HOME, "/etc/R", "/etc/ssl")
        and not args[0].startswith("/dev")
    ]
    for _verb, path, content, mode in _etc_files(uid):
        replace = path.removeprefix("/etc/") in _REPLACED
        steps.append(("image_file", path, content, mode, replace))
    return steps


def image_guest_root(uid: int) -> Steps:
    places = [
        ("image_dir", path, mode, False) for path, mode in (("/dev", 0o755), ("/proc", 0o555))
    ]
    return [*places, *_image_layout(uid)]


def _root(uid: int, environment: list[tuple[str, str, int]]) -> tuple[list[Tree], Steps]:
    steps = [*_LAYOUT, *_etc_files(uid), *links()]
    trees: list[Tree] = []
    for source, target, attributes in shown():
        steps.append(("show", target, len(trees), os.path.isdir(source)))
        trees.append(tree(source, attributes))
    for source, target, attributes in environment:
        steps.append(("bind", target, len(trees)))
        trees.append(tree(source, attributes))
    return trees, [*steps, *after_binds(), ("boot_id",)]


def guest_root(uid: int) -> tuple[Steps, list[Tree]]:
    """Steps and trees of the root of a guest whose own kernel provides its /dev and /proc."""
    steps = [*_LAYOUT, *_etc_files(uid), *links(), ("dir", "/proc", 0o555, False)]
    trees: list[Tree] = []
    for source, target, attributes in shown():
        if not target.startswith("/dev/"):
            steps.append(("show", target, len(trees), os.path.isdir(source)))
            trees.append(tree(source, attributes))
    return steps, trees


def far_root(uid: int) -> dict[str, Any]:
    """The root on a far host, which has its own programs: what `guest.far_start` makes there."""
    steps: Steps = [("dir", path, 0o755) for path in ("/opt", _NAMES)]
    steps.append(("symlink", f"{_NAMES}/python", "/usr/bin/python3"))
    steps += [step[:3] for step in _LAYOUT if not step[1].startswith("/dev") and step[1] != "/etc"]
    steps += [("file", path, text.decode(), mode) for _, path, text, mode in _etc_files(uid)]
    masked = [f"/proc/{name}" for name in _MASKED]
    return {"steps": steps, "links": _USR_LINKS, "etc": _ETC_SHOWN, "masked": masked}


def _etc_files(uid: int) -> Steps:
    users = {"root": 0, "sandbox": identity.SANDBOX_UID, "nobody": identity.NOBODY}
    if uid not in users.values():
        users["user"] = uid
    homes = {"root": "/root", "nobody": "/nonexistent"}
    passwd = "".join(f"{n}:x:{u}:{u}::{homes.get(n, HOME)}:/bin/sh\n" for n, u in users.items())
    group = "".join(f"{'nogroup' if n == 'nobody' else n}:x:{u}:\n" for n, u in users.items())
    files = {
        "passwd": passwd,
        "group": group,
        "hosts": _HOSTS.format(HOSTNAME),
        "hostname": f"{HOSTNAME}\n",
        # Of a sandbox without network nobody is there: refused at once. It may get one later.
        "resolv.conf": "nameserver 127.0.0.53\noptions timeout:2 attempts:2\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n",
        "shells": "/bin/sh\n/bin/bash\n",
    }
    return [("file", f"/etc/{name}", text.encode(), 0o644) for name, text in files.items()]


def new_hostname() -> str:
    """Make a unique hostname for a sandbox that continues another's state."""
    return f"{HOSTNAME}-{os.urandom(4).hex()}"


def for_accounts() -> Steps:
    """Plan the files of /etc that programs for managing users need: root may use them, no one else."""
    pam = (
        "auth sufficient pam_rootok.so\nauth required pam_deny.so\naccount required pam_permit.so\n"
    )
    pam += "password required pam_deny.so\nsession required pam_permit.so\n"
    return [
        ("dir", "/etc/skel", 0o755, False),
        ("dir", "/etc/pam.d", 0o755, False),
        ("file", "/etc/pam.d/other", pam.encode(), 0o644),
    ]


def shown() -> list[tuple[str, str, int]]:
    """Host paths that the template shows: source, target, mount attributes."""
    found = [("/usr", "/usr", READ_ONLY)]
    for name in _USR_LINKS:
        if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}"):
            found.append((f"/{name}", f"/{name}", READ_ONLY))
    for name in _ETC_SHOWN:
        source = f"/etc/{name}"
        if os.path.exists(source) and _world_readable(source):
            found.append((os.path.realpath(source), source, READ_ONLY))
    return [*found, *((f"/dev/{name}", f"/dev/{name}", DEVICE) for name in _DEVICES)]


def shown_etc() -> list[str]:
    """List the host files of /etc that are visible inside, at their own path."""
    return [target for _source, target, _attributes in shown() if target.startswith("/etc/")]


def links() -> Steps:
    """/bin and friends where the host has merged them into /usr, the time zone, `python` and `sudo`."""
    steps: Steps = [("dir", path, 0o755, False) for path in ("/opt", _NAMES)]
    steps.append(("file", f"{_NAMES}/sudo", _SUDO, 0o755))
    if not os.path.exists("/usr/bin/python") and os.path.exists("/usr/bin/python3"):
        # Last on PATH. Debian has no `python`; what models and frameworks run is called just that.
        steps.append(("symlink", f"{_NAMES}/python", "/usr/bin/python3"))
    for name in _USR_LINKS:
        if os.path.islink(f"/{name}"):
            steps.append(("symlink", f"/{name}", os.readlink(f"/{name}")))
    zone = os.path.realpath("/etc/localtime")
    if zone.startswith("/usr/"):
        steps.append(("symlink", "/etc/localtime", zone))
    return steps


def after_binds() -> Steps:
    """/proc, its masks, and terminals."""
    return [("proc",), *(("mask", path) for path in masked()), ("devpts",)]


def masked() -> list[str]:
    """List the files of /proc that reveal facts about the whole host."""
    return [f"/proc/{name}" for name in _MASKED if os.path.exists(f"/proc/{name}")]


def written(uid: int) -> dict[str, bytes]:
    """List the files of /etc in every root, an image's too: path to content."""
    return {
        path: content
        for _verb, path, content, _mode in _etc_files(uid)
        if path.removeprefix("/etc/") in _REPLACED
    }


def python_environment() -> list[tuple[str, str, int]]:
    """The caller's interpreter and its packages, at the same paths inside."""
    prefixes = dict.fromkeys(os.path.realpath(p) for p in (sys.base_prefix, sys.prefix))
    return [(p, p, READ_ONLY) for p in prefixes if not (p + "/").startswith("/usr/")]


def python_path() -> str:
    """PATH with the caller's interpreter first."""
    return f"{sys.prefix}/bin:{sys.base_prefix}/bin:{PATH}"


def tree(source: str, attributes: int) -> Tree:
    """A tree of the template: a path that only the host's administrator can change."""
    return {
        "source": source,
        "device": 0,
        "inode": 0,
        "attributes": attributes,
        "idmap": "",
        "idmap_gid": "",
        "fd": -1,
    }


def _world_readable(path: str) -> bool:
    return bool(os.stat(path).st_mode & stat.S_IROTH)


_MOST_BYTES = 256 << 10  # of /etc/hosts: lists that block advertising have megabytes
_KEYWORDS = ("nameserver", "search", "domain", "options", "sortlist")  # resolv.conf(5)


def with_hostname(hostname: str) -> list[tuple[Any, ...]]:
    """Return steps that name a sandbox in its files as `sethostname` does."""
    texts = {"hosts": _HOSTS.format(hostname), "hostname": f"{hostname}\n"}
    return [("rewrite", f"/etc/{name}", text.encode()) for name, text in texts.items()]


def as_the_host(hostname: str) -> list[tuple[Any, ...]]:
    """Return steps that give a root of the template the host's name servers, and its names of hosts.

    A sandbox that shares the host's network resolves names as the host does.

    Read anew for each sandbox: a laptop's name servers change with its network. A name server on
    loopback, such as systemd-resolved's, is reached as it is: the loopback is the host's. Without
    any, resolv.conf(5) has programs ask 127.0.0.1. A list of hosts beyond 256 KiB is left out.
    """
    servers = [line for line in _lines("/etc/resolv.conf") if line.split()[0] in _KEYWORDS]
    hosts = [*_HOSTS.format(hostname).splitlines(), *_lines("/etc/hosts")]
    return [
        ("rewrite", f"/etc/{name}", "".join(f"{line}\n" for line in lines).encode())
        for name, lines in (("resolv.conf", servers), ("hosts", hosts))
    ]


def _lines(path: str) -> list[str]:
    """Read a file's lines without comments; none where it is missing or too large."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            if os.fstat(file.fileno()).st_size > _MOST_BYTES:
                return []
            text = file.read()
    except OSError:
        return []
    said = (line.partition("#")[0].partition(";")[0].strip() for line in text.splitlines())
    return [line for line in said if line]
