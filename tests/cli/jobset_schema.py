"""The part of Kubernetes' API that a JobSet of ours uses: fields and types by object, as the API's reference has them.

JobSet v1alpha2 (jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2), batch/v1, core/v1 and meta/v1.
"""

from __future__ import annotations

from typing import Any

STRINGS = {"value": str}
QUANTITY = (str, int)

SCHEMA: dict[str, dict[str, Any]] = {
    "JobSet": {"apiVersion": str, "kind": str, "metadata": "ObjectMeta", "spec": "JobSetSpec"},
    "ObjectMeta": {"name": str, "namespace": str, "labels": STRINGS, "annotations": STRINGS},
    "JobSetSpec": {
        "replicatedJobs": ["ReplicatedJob"], "network": "Network", "failurePolicy": "FailurePolicy", "suspend": bool,
        "managedBy": str, "ttlSecondsAfterFinished": int,
    },
    "Network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
    "FailurePolicy": {"maxRestarts": int, "restartStrategy": str, "rules": ["FailurePolicyRule"]},
    "FailurePolicyRule": {
        "name": str, "action": str, "onJobFailureReasons": [str], "onJobFailureMessagePatterns": [str],
        "targetReplicatedJobs": [str],
    },
    "ReplicatedJob": {"name": str, "groupName": str, "template": "JobTemplateSpec", "replicas": int},
    "JobTemplateSpec": {"metadata": "ObjectMeta", "spec": "JobSpec"},
    "JobSpec": {
        "parallelism": int, "completions": int, "completionMode": str, "activeDeadlineSeconds": int,
        "backoffLimit": int, "podFailurePolicy": "PodFailurePolicy", "template": "PodTemplateSpec",
    },
    "PodFailurePolicy": {"rules": ["PodFailurePolicyRule"]},
    "PodFailurePolicyRule": {"action": str, "onExitCodes": "OnExitCodes", "onPodConditions": ["PodCondition"]},
    "OnExitCodes": {"containerName": str, "operator": str, "values": [int]},
    "PodCondition": {"type": str, "status": str},
    "PodTemplateSpec": {"metadata": "ObjectMeta", "spec": "PodSpec"},
    "PodSpec": {
        "restartPolicy": str, "terminationGracePeriodSeconds": int, "containers": ["Container"], "volumes": ["Volume"],
        "nodeSelector": STRINGS, "hostNetwork": bool, "subdomain": str,
    },
    "Container": {
        "name": str, "image": str, "imagePullPolicy": str, "workingDir": str, "command": [str], "args": [str],
        "env": ["EnvVar"], "resources": "Resources", "volumeMounts": ["VolumeMount"],
    },
    "EnvVar": {"name": str, "value": str},
    "Resources": {"limits": {"value": QUANTITY}, "requests": {"value": QUANTITY}},
    "VolumeMount": {"name": str, "mountPath": str, "readOnly": bool, "subPath": str},
    "Volume": {"name": str, "emptyDir": "EmptyDir", "persistentVolumeClaim": "Claim", "configMap": "ConfigMapVolume"},
    "EmptyDir": {"medium": str, "sizeLimit": QUANTITY},
    "Claim": {"claimName": str, "readOnly": bool},
    "ConfigMapVolume": {"name": str, "defaultMode": int, "optional": bool},
    "ConfigMap": {"apiVersion": str, "kind": str, "metadata": "ObjectMeta", "data": STRINGS},
}  # fmt: skip
"""Fields by object: a type of Python, the name of another object, a list of either, or a mapping with free keys."""

ENUMS = {
    "apiVersion": {"jobset.x-k8s.io/v1alpha2", "v1"},
    "completionMode": {"Indexed", "NonIndexed"},
    "restartPolicy": {"Never", "OnFailure"},
    "operator": {"In", "NotIn"},
    "onJobFailureReasons": {"BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded",
                            "PodFailurePolicy"},
    "medium": {"", "Memory", "HugePages"},
    "FailurePolicyRule.action": {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"},
    "PodFailurePolicyRule.action": {"FailJob", "FailIndex", "Ignore", "Count"},
}  # fmt: skip
"""Values that the API allows, by field."""


def breaches(value: Any, kind: Any, path: str = "") -> list[str]:
    """Differences of a value from the schema."""
    if isinstance(kind, list):
        if not isinstance(value, list):
            return [f"{path} is not a list"]
        return [one for at, inner in enumerate(value) for one in breaches(inner, kind[0], f"{path}[{at}]")]
    if not isinstance(kind, str | dict):
        expected = kind if isinstance(kind, tuple) else (kind,)
        return [] if type(value) in expected else [f"{path} = {value!r} has the wrong type"]
    if not isinstance(value, dict):
        return [f"{path} is not a mapping"]
    found = []
    for name, inner in value.items():
        here = f"{path}.{name}"
        field = kind["value"] if isinstance(kind, dict) else SCHEMA[kind].get(name)
        if field is None:
            found.append(f"{here} is no field of {kind}")
            continue
        found += breaches(inner, field, here)
        allowed = ENUMS.get(f"{kind}.{name}", ENUMS.get(name)) if isinstance(kind, str) else None
        values = inner if isinstance(inner, list) else [inner]
        found += [f"{here} = {one!r} is not allowed" for one in values if allowed is not None and one not in allowed]
    return found
