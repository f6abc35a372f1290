"""The manifests of the guide, read as Ray's autoscaler on Kubernetes and a gateway read them: offline."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from ringfence.cluster.directory import TRIED
from ringfence.daemon.config import DaemonConfig

GUIDES = Path(__file__).parents[3] / "docs" / "how-to"


def _blocks(name: str) -> list[Any]:
    (text,) = re.findall(r"```yaml\n(.*?)```", (GUIDES / name).read_text(), re.DOTALL)
    return [*yaml.safe_load_all(text)]


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    return {each["kind"]: each for each in _blocks("kuberay.md")}


def test_rays_autoscaler_takes_the_cluster_and_one_node_fits_what_is_asked_for(
    manifests: dict[str, Any],
) -> None:
    from ray.autoscaler._private.kuberay import autoscaling_config

    found = autoscaling_config._derive_autoscaling_config_from_ray_cr(manifests["RayCluster"])

    scaling = DaemonConfig.from_json(_config(manifests)).scaling
    assert scaling is not None
    worker = found["available_node_types"]["nodes"]
    assert scaling.max_nodes == worker["max_workers"] + 1 == found["max_workers"] + 1
    for name, amount in scaling.resources.items():
        assert amount <= worker["resources"][name] < 2 * amount
    assert 60 == found["idle_timeout_minutes"] * 60
    assert manifests["RayCluster"]["spec"]["rayVersion"].rpartition(".")[0] in TRIED


def _config(manifests: dict[str, Any]) -> Any:
    return json.loads(manifests["ConfigMap"]["data"]["config.json"])


def test_its_pods_have_what_sandboxes_need(manifests: dict[str, Any]) -> None:
    """The lines of the guide for one pod, which say why."""
    (pod,) = _blocks("kubernetes.md")
    spec = manifests["RayCluster"]["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        found = group["template"]["spec"]
        assert pod["spec"]["securityContext"] == found["securityContext"]
        assert pod["spec"]["hostUsers"] is found["hostUsers"] is False
        for container in found["containers"]:
            wanted = pod["spec"]["containers"][0]["securityContext"]
            assert wanted == container["securityContext"]
            assert "$KUBERAY_GEN_RAY_START_CMD" in container["args"][0]


def test_the_service_leads_to_the_gateway(manifests: dict[str, Any]) -> None:
    head = manifests["RayCluster"]["spec"]["headGroupSpec"]["template"]["spec"]
    mounts = {each["mountPath"] for each in head["containers"][0]["volumeMounts"]}
    (port,) = head["containers"][0]["ports"]
    (served,) = manifests["Service"]["spec"]["ports"]
    config = _config(manifests)
    assert port["name"] == served["targetPort"]
    assert str(port["containerPort"]) == config["listen"].rpartition(":")[2]
    assert {str(Path(config["tls_key"]).parent), "/etc/ringfence"} <= mounts
    names = {each["metadata"]["namespace"] for each in manifests.values()}
    assert {"agents"} == names
    assert config["allowed_hosts"] == [f"{manifests['Service']['metadata']['name']}.agents.svc"]
