"""A rollout on a Ray cluster: each answer is judged in a sandbox of its own, on whatever node has room.

Start Ray with `ray start --head`, or let `ray.init()` start one node here.
"""

import ray

from ringfence.ray import map_sandboxes

ANSWERS = ["sum(range(101))", "5050", "undefined", "sum(range(100))"]


def reward(sandbox, answer):
    """Run an untrusted answer; a failure is a reward of 0, not an error."""
    result = sandbox.exec(["python3", "-c", f"print({answer})"], timeout_s=10)
    return float(result.stdout_text.strip() == "5050")


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    print(map_sandboxes(reward, ANSWERS, concurrency=2, retries=2))
    ray.shutdown()
