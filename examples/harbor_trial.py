"""A Harbor task solved by its oracle in a sandbox, offline. Needs the extra `harbor`, and Python 3.12."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

TASK = """
version = "1.0"
[environment]
docker_image = "nothing-is-pulled"
workdir = "/app"
allow_internet = false
"""
FILES = {
    "task.toml": TASK,
    "instruction.md": "Write the sum of 0 to 100 to sum.txt.\n",
    "environment/README": "nothing is needed\n",
    "solution/solve.sh": "python3 -c 'print(sum(range(101)))' > sum.txt\n",
    "tests/test.sh": "grep -cx 5050 sum.txt > /logs/verifier/reward.txt\n",
}
ENVIRONMENT = "ringfence.integrations.harbor:RingfenceEnvironment"

with tempfile.TemporaryDirectory() as place:
    for name, text in FILES.items():
        path = Path(place) / "task" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    words = ["-p", f"{place}/task", "-a", "oracle", "-o", f"{place}/jobs", "-e", ENVIRONMENT]
    subprocess.run(
        ["harbor", "run", *words, "--ek", "image=default"],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HARBOR_TELEMETRY": "off", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )
    (result,) = Path(place).glob("jobs/*/*/result.json")
    print("reward", json.loads(result.read_text())["verifier_result"]["rewards"]["reward"])
