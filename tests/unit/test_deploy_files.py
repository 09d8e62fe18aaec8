"""Files of deploy/: fields that KubeRay's API has, an image that runs as a user, a script without faults."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def fields(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


TEXT, NUMBER, YES = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
AMOUNTS = {"type": "object", "additionalProperties": {"type": ["string", "integer"]}}
CONTAINER = fields(
    ("name", "image"),
    name=TEXT,
    image=TEXT,
    ports={"type": "array", "items": fields(("containerPort",), name=TEXT, containerPort=NUMBER)},
    env={"type": "array", "items": fields(("name", "value"), name=TEXT, value=TEXT)},
    resources=fields(requests=AMOUNTS, limits=AMOUNTS),
    volumeMounts={"type": "array", "items": fields(("name", "mountPath"), name=TEXT, mountPath=TEXT)},
)
VOLUME = fields(
    ("name",),
    name=TEXT,
    persistentVolumeClaim=fields(("claimName",), claimName=TEXT),
    emptyDir=fields(medium={"enum": ["Memory"]}, sizeLimit=TEXT),
)
TEMPLATE = fields(
    ("spec",),
    metadata=fields(labels=TEXTS, annotations=TEXTS),
    spec=fields(
        ("containers",),
        terminationGracePeriodSeconds=NUMBER,
        securityContext=fields(runAsNonRoot=YES, runAsUser=NUMBER, fsGroup=NUMBER),
        containers={"type": "array", "items": CONTAINER, "minItems": 1},
        volumes={"type": "array", "items": VOLUME},
    ),
)
NODE_GROUP = fields(
    ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
    groupName=TEXT,
    replicas=NUMBER,
    minReplicas=NUMBER,
    maxReplicas=NUMBER,
    numOfHosts=NUMBER,
    rayStartParams=TEXTS,
    template=TEMPLATE,
)
CLUSTER = fields(
    ("headGroupSpec",),
    rayVersion=TEXT,
    headGroupSpec=fields(("rayStartParams", "template"), rayStartParams=TEXTS, template=TEMPLATE),
    workerGroupSpecs={"type": "array", "items": NODE_GROUP},
)
JOB = fields(
    ("entrypoint", "rayClusterSpec"),
    entrypoint=TEXT,
    runtimeEnvYAML=TEXT,
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
    backoffLimit=NUMBER,
    activeDeadlineSeconds=NUMBER,
    shutdownAfterJobFinishes=YES,
    ttlSecondsAfterFinished=NUMBER,
    rayClusterSpec=CLUSTER,
)
SPECS = {"RayCluster": CLUSTER, "RayJob": JOB}
"""The part of KubeRay's API v1 and of Kubernetes' pods that the manifests use; compared with rayjob_types.go (f6ef3f7)
and raycluster_types.go (3275ee0) of ray-operator/apis/ray/v1."""


@pytest.mark.parametrize("path", sorted((DEPLOY / "k8s").glob("*.yaml")), ids=lambda path: path.name)
def test_manifests_have_the_fields_of_kuberay_and_room_for_what_runs(path: Path) -> None:
    manifest = yaml.safe_load(path.read_text())
    assert manifest["apiVersion"] == "ray.io/v1"
    jsonschema.validate(manifest["spec"], SPECS[manifest["kind"]])
    cluster = manifest["spec"].get("rayClusterSpec", manifest["spec"])
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        store = int(group["rayStartParams"]["object-store-memory"])
        assert store < int(volumes["shm"]["emptyDir"]["sizeLimit"].removesuffix("Gi")) * 2**30
        assert pod["securityContext"]["runAsUser"] == 10001
        gpus = container["resources"]["limits"].get("nvidia.com/gpu", 0)
        assert str(gpus) == group["rayStartParams"].get("num-gpus", "0")
    assert f'rayVersion: "{constraints()["ray"]}"' in path.read_text()


def constraints() -> dict[str, str]:
    lines = (DEPLOY / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_the_image_is_pinned_copies_what_is_there_and_runs_as_a_user() -> None:
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line.split(None, 1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    known = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "ENTRYPOINT", "CMD"}
    assert {instruction for instruction, _ in lines} <= known
    [base] = [rest for instruction, rest in lines if instruction == "ARG"]
    assert re.fullmatch(r"BASE=nvidia/cuda:\d+\.\d+\.\d+-base-\w+\.?\d*", base)
    assert [rest for instruction, rest in lines if instruction == "USER"] == ["10001"]
    for source in (
        word
        for instruction, rest in lines
        if instruction == "COPY" and not rest.startswith("--from")
        for word in rest.split()[:-1]
    ):
        assert (ROOT / source).exists(), source
    assert "--constraint constraints.txt" in text


def test_every_requirement_has_a_version_in_the_constraints() -> None:
    pinned = constraints()
    required = re.search(r"install_requires =\n((?: {4}.*\n)+)", (ROOT / "setup.cfg").read_text())
    assert required is not None
    names = [re.split(r"[\[<>=]", line.strip())[0].lower().replace("_", "-") for line in required[1].splitlines()]
    assert [name for name in names if name not in pinned] == []


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed (Debian: shellcheck)")
def test_shellcheck_finds_nothing_in_the_slurm_script() -> None:
    checked = subprocess.run(
        ["shellcheck", str(DEPLOY / "slurm/flowtrain.sbatch")], capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stdout


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_finds_no_fault_in_configuration_and_rules() -> None:
    """The configuration names the rules, which are checked with it."""
    command = ["promtool", "check", "config", str(DEPLOY / "prometheus/prometheus.yml")]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
    assert "6 rules found" in checked.stdout
