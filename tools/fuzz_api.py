"""Run every check and phase of schemathesis against a real `ringfence serve`.

    python tools/fuzz_api.py [--seconds 600] [--seed N] [--scope admin|user] [ARGUMENT...]

What it excludes is in tests/api/schemathesis.toml, with the reasons. Further arguments are those of
`schemathesis run`. Exits with its code; the report is in build/schemathesis.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ringfence.client import Client

TREE = Path(__file__).parent.parent
EXCLUSIONS = TREE / "tests" / "api" / "schemathesis.toml"


def main() -> int:
    """Serve on a state of its own, make a key, and run."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--scope", choices=("admin", "user"), default="admin")
    options, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="rf-fuzz-") as place:
        serve = [sys.executable, "-m", "ringfence", "serve", "--json", "--log-level", "error"]
        serve += ["--state-dir", f"{place}/s", "--listen", "127.0.0.1:0", "--max-sandboxes", "60"]
        with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as daemon:
            assert daemon.stdout is not None
            try:
                unix, tcp = sorted(json.loads(daemon.stdout.readline())["listening"], reverse=True)
                with Client(unix) as client:
                    key = client.make_key("fuzz", scope=options.scope)["key"]
                    client._transport.json("GET", "/v1/openapi.json")  # made when first asked for
                return _run(tcp, key, options.seconds, options.seed, more)
            finally:
                daemon.terminate()
                daemon.wait(60)


def _run(url: str, key: str, seconds: int, seed: str, more: list[str]) -> int:
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(EXCLUSIONS), "run"]
    command += [f"{url}/v1/openapi.json", "--header", f"Authorization: Bearer {key}"]
    command += ["--max-time", str(seconds), "--seed", seed, "--checks", "all"]
    command += [
        "--continue-on-failure",
        "--report",
        "json,har",
        "--report-dir",
        "build/schemathesis",
    ]
    env = {**os.environ, "RINGFENCE_FUZZ": f"{url} {key}", "PYTHONPATH": f"{TREE}:{TREE / 'src'}"}
    return subprocess.call([*command, *more], cwd=TREE, env=env)


if __name__ == "__main__":
    sys.exit(main())
