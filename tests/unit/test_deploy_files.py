"""Files of deploy/: fields that KubeRay's API has, an image that runs as a user, a script without faults."""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml

from flowtrain.allocator.limits import BASE_DESCRIPTORS, PEER_DESCRIPTORS
from flowtrain.cli.job import SWEEP_SECONDS
from flowtrain.cli.launch import PATIENCE_SECONDS
from flowtrain.cli.main import make_app
from flowtrain.config.schema import RunConfig, TelemetryConfig
from flowtrain.runtime.checkup import NODE_FILES, STORE_BYTES
from flowtrain.telemetry.metrics import METRICS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def fields(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


TEXT, NUMBER, YES = {"type": "string"}, {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
ANY_TEXTS = {"type": "array", "items": TEXT}
QUANTITY = {
    "type": ["string", "integer"],
    "pattern": r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+))?$",
}
AMOUNTS = {"type": "object", "additionalProperties": QUANTITY}
NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
CONTAINER = fields(
    ("name", "image"),
    name=NAME,
    image=TEXT,
    ports={"type": "array", "items": fields(("containerPort",), name={**NAME, "maxLength": 15}, containerPort=PORT)},
    env={"type": "array", "items": fields(("name", "value"), name=TEXT, value=TEXT)},
    securityContext=fields(capabilities=fields(add=ANY_TEXTS, drop=ANY_TEXTS), runAsUser=NUMBER, runAsNonRoot=YES),
    resources=fields(requests=AMOUNTS, limits=AMOUNTS),
    volumeMounts={"type": "array", "items": fields(("name", "mountPath"), name=NAME, mountPath=TEXT)},
)
VOLUME = fields(
    ("name",),
    name=NAME,
    persistentVolumeClaim=fields(("claimName",), claimName=TEXT),
    emptyDir=fields(medium={"enum": ["Memory"]}, sizeLimit=QUANTITY),
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
    groupName=NAME,
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
    activeDeadlineSeconds={**NUMBER, "minimum": 1},
    shutdownAfterJobFinishes=YES,
    ttlSecondsAfterFinished=NUMBER,
    rayClusterSpec=CLUSTER,
)
KINDS = {
    kind: fields(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": "ray.io/v1"},
        kind={"const": kind},
        metadata=fields(("name",), name={**NAME, "maxLength": 47}, namespace=NAME, labels=TEXTS, annotations=TEXTS),
        spec=spec,
    )
    for kind, spec in (("RayCluster", CLUSTER), ("RayJob", JOB))
}
"""The part of KubeRay's API v1 and of Kubernetes' pods that the manifests use, and what of it they may not leave out
(stricter where KubeRay would take a default). Compared with ray-project/kuberay, ray-operator:
apis/ray/v1/rayjob_types.go (f6ef3f7) and raycluster_types.go (3275ee0); pods with
config/crd/bases/ray.io_rayclusters.yaml (1184bc8). KubeRay makes names of services and pods from a cluster's, which
leaves 47 letters for a RayJob's name."""
RDMA = re.compile(r"^(\s*)# (- \{name: (?:NCCL|UCX)_.*|securityContext: .*)$", re.MULTILINE)
RDMA_AMOUNT = re.compile(r"^(\s*)# (?:requests|limits) with RDMA: (\S+): (\d+),.*$", re.MULTILINE)
MANIFESTS = sorted((DEPLOY / "k8s").glob("*.yaml"))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_have_the_fields_of_kuberay_and_room_for_what_runs(path: Path) -> None:
    manifest = yaml.safe_load(path.read_text())
    jsonschema.validate(manifest, KINDS[manifest["kind"]])
    for group in groups(manifest):
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        shm = gibibytes(volumes["shm"]["emptyDir"]["sizeLimit"])
        assert int(group["rayStartParams"]["object-store-memory"]) < shm
        assert shm < gibibytes(container["resources"]["limits"]["memory"]), "the volume counts against the limit"
        assert pod["securityContext"]["runAsUser"] == 10001
        gpus = container["resources"]["limits"].get("nvidia.com/gpu", 0)
        assert str(gpus) == group["rayStartParams"].get("num-gpus", "0")
    assert f'rayVersion: "{constraints()["ray"]}"' in path.read_text()


def groups(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = manifest["spec"].get("rayClusterSpec", manifest["spec"])
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def gibibytes(text: str) -> int:
    assert text.endswith("Gi"), text
    return int(text.removesuffix("Gi")) * 2**30


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_ray_start_has_the_parameters_of_the_manifests_and_flowtrain_those_of_the_entrypoint(path: Path) -> None:
    from click.testing import CliRunner
    from ray.scripts.scripts import start

    manifest = yaml.safe_load(path.read_text())
    options = {option for parameter in start.params for option in parameter.opts}
    for group in groups(manifest):
        assert {f"--{name}" for name in group["rayStartParams"]} <= options
    if manifest["kind"] == "RayJob":
        program, command, config, *words = shlex.split(manifest["spec"]["entrypoint"])
        assert (program, command, Path(config).parts[1]) == ("flowtrain", "launch", "shared")
        help_ = CliRunner().invoke(typer.main.get_command(make_app()), ["launch", "--help"]).output
        assert {word for word in words if word.startswith("--")} <= set(re.findall(r"--[a-z-]+", help_))
        keys = [pair.split("=")[0] for word, pair in itertools.pairwise(words) if word == "--set"]
        assert [key for key in keys if f"| `{key}` |" not in (ROOT / "docs/configuration.md").read_text()] == []
        runtime = yaml.safe_load(manifest["spec"]["runtimeEnvYAML"])
        needed = RunConfig().stop_deadline_seconds + PATIENCE_SECONDS + SWEEP_SECONDS
        assert float(runtime["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) >= needed


@pytest.mark.parametrize("path", [path for path in MANIFESTS if "gpu" in path.name], ids=lambda path: path.name)
def test_the_lines_for_rdma_are_of_the_schema_too(path: Path) -> None:
    """They stand there as comments: whoever takes the mark away gets a manifest that KubeRay takes."""
    text, num_lines = RDMA.subn(r"\1\2", path.read_text())
    text, num_amounts = RDMA_AMOUNT.subn("", text)
    assert (num_lines, num_amounts) == (3, 2)
    manifest = yaml.safe_load(text)
    jsonschema.validate(manifest, KINDS[manifest["kind"]])
    [container] = groups(manifest)[1]["template"]["spec"]["containers"]
    assert {"NCCL_IB_HCA", "UCX_NET_DEVICES"} < {one["name"] for one in container["env"]}
    assert container["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"]}


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


def test_files_of_deploy_that_the_pages_name_are_there() -> None:
    named = set()
    for page in (*ROOT.glob("docs/*.md"), ROOT / "README.md", *DEPLOY.rglob("*.y*ml"), *DEPLOY.rglob("*.sbatch")):
        named |= set(re.findall(r"\bdeploy/[\w./-]+\w", page.read_text()))
    assert len(named) > 6
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_limits_that_the_page_tells_are_those_of_the_code() -> None:
    page = (ROOT / "docs/deployment.md").read_text()
    assert f"{BASE_DESCRIPTORS} and {PEER_DESCRIPTORS} for each process of the run, at least {NODE_FILES:,}" in page
    assert f"object store needs {STORE_BYTES >> 20} MiB" in page
    assert f"`run.stop_deadline_seconds` ({RunConfig().stop_deadline_seconds:g})" in page
    assert f"| {TelemetryConfig().prometheus_port}, the prometheus sink" in page
    version = re.search(r"^version = (\S+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    assert version is not None
    assert f"flowtrain:{version[1]} ." in page
    for name in ("pool/pinned_bytes", "pool/bytes_out/nixl"):
        assert f"`{name}`" in page
        METRICS.find(name)  # KeyError where no record has it
    store = re.findall(r"--object-store-memory=(\d+)", (DEPLOY / "slurm/flowtrain.sbatch").read_text())
    assert store == ["1000000000"]
    assert "1 GB as the Slurm script" in page
