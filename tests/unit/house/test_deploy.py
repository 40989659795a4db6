"""KubeRay's manifest in deploy/ against a schema of the fields that it may have.

The schema is written from KubeRay's API types (ray.io/v1: RayJobSpec, RayClusterSpec, HeadGroupSpec, WorkerGroupSpec);
for what stands in a pod, from those Kubernetes fields that the manifest uses. It isn't the CRD itself.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

MANIFEST = Path(__file__).parents[3] / "deploy/kuberay/rayjob.yaml"
TEXT, COUNT, SWITCH = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}


def record(required: str, **properties: Any) -> dict[str, Any]:
    """Schema of an object with these properties and no others."""
    fields = {"type": "object", "additionalProperties": False, "properties": properties}
    return fields | {"required": required.split()}


def several(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": item}


POD = record(
    "spec",
    metadata=record("", labels=TEXTS, annotations=TEXTS),
    spec=record(
        "containers",
        containers=several(
            record(
                "name image",
                name=TEXT,
                image=TEXT,
                ports=several(record("containerPort", containerPort=COUNT, name={"type": "string", "maxLength": 15})),
                resources=record("", requests=TEXTS, limits=TEXTS),
                volumeMounts=several(record("name mountPath", name=TEXT, mountPath=TEXT)),
            )
        ),
        volumes=several(
            record(
                "name",
                name=TEXT,
                persistentVolumeClaim=record("claimName", claimName=TEXT, readOnly=SWITCH),
                emptyDir=record("", medium=TEXT, sizeLimit=TEXT),
            )
        ),
    ),
)
HEAD = record("rayStartParams template", serviceType=TEXT, enableIngress=SWITCH, rayStartParams=TEXTS, template=POD)
WORKERS = record(
    "groupName minReplicas maxReplicas rayStartParams template",
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    numOfHosts=COUNT,
    rayStartParams=TEXTS,
    template=POD,
)
RAY_JOB = record(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=record("name", name=TEXT, namespace=TEXT, labels=TEXTS),
    spec=record(
        "entrypoint rayClusterSpec",
        entrypoint=TEXT,
        activeDeadlineSeconds=COUNT,
        backoffLimit=COUNT,
        runtimeEnvYAML=TEXT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
        shutdownAfterJobFinishes=SWITCH,
        ttlSecondsAfterFinished=COUNT,
        suspend=SWITCH,
        rayClusterSpec=record(
            "headGroupSpec",
            rayVersion=TEXT,
            enableInTreeAutoscaling=SWITCH,
            headGroupSpec=HEAD,
            workerGroupSpecs=several(WORKERS),
        ),
    ),
)


def test_rayjob_has_the_fields_of_kuberays_types():
    jsonschema.validate(yaml.safe_load(MANIFEST.read_text()), RAY_JOB)


@pytest.mark.parametrize(
    ("path", "value"),
    [(("spec", "rayClusterSpec", "headGroupSpec", "replicas"), 1), (("spec", "ttlSecondsAfterFinished"), "600")],
)
def test_misplaced_field_or_wrong_type_is_found(path: tuple[str, ...], value: Any):
    manifest = copy.deepcopy(yaml.safe_load(MANIFEST.read_text()))
    place = manifest
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest, RAY_JOB)


def test_pods_mount_what_they_name():
    cluster = yaml.safe_load(MANIFEST.read_text())["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]} == volumes
