"""Kubernetes manifest that starts a lowered program on all hosts of its plan, without an operator."""

from __future__ import annotations

import re
import shlex
import textwrap
from typing import Final

from legoai.lowering.launch import LaunchError, launch_path
from legoai.lowering.launch.job import ENVIRONMENT, GRACE_SECONDS, Job

IMAGE: Final = "YOUR_IMAGE"
CLAIM: Final = "YOUR_CLAIM"
"""Placeholders of what no plan knows. No pod starts with them, so that none is overlooked."""

_RESTARTS: Final = 3
"""Failures of ranks after which torchrun restarts those of all hosts, and of pods, for each host, that are replaced."""

_LARGEST: Final = 1 << 20
"""Bytes that a ConfigMap may have."""

_LONGEST_NAME: Final = 63
"""Characters of a pod's host name, which is the job's name with a dash and the pod's index."""

_PORT: Final = 29400
"""torchrun's default for its rendezvous."""

_NEW_STORE: Final = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Lets the ranks have a new store in each attempt.

By default they share the agents' one, whose address a replaced agent waits for in vain, as torch 2.12 and 2.13 set it
only once (https://github.com/pytorch/pytorch/issues/135712).
"""

_WORK: Final = "/work"
_FOLDER: Final = "/program"
_FILE: Final = "lowered-program.py"
"""No module has this name, so that the program is imported in the place of none."""


def text(job: Job) -> str:
    """Return the manifest: a ConfigMap with the program, a headless Service, and an Indexed Job with a pod per host.

    A rank that fails is restarted by torchrun, with those of all hosts, in its pod. A pod that ends is replaced by the
    Job, and the agents of the other pods wait for the new one. Either way training resumes from its newest checkpoint.

    Raises:
        LaunchError: the program is larger than a ConfigMap can be.
    """
    size = len(job.text.encode())
    if size > _LARGEST:
        raise LaunchError(
            f"the program has {size:,} bytes, and the ConfigMap in which it would travel takes {_LARGEST:,}"
        )
    name = f'"{_name(job)}"'  # quoted: YAML reads `no` as false
    parts = (_header(job), _config_map(job, name), _service(name), _job(job, name))
    return "---\n".join(parts)


def _name(job: Job) -> str:
    """The objects' name: lower-case letters, digits and dashes, a letter first."""
    longest = _LONGEST_NAME - len(f"-{job.hosts - 1}")
    name = re.sub("[^a-z0-9]+", "-", job.name.lower()).strip("-")
    return (name if name[:1].isalpha() else f"plan-{name}")[:longest].strip("-")


def _header(job: Job) -> str:
    file = shlex.quote(launch_path("k8s", job.program).as_posix())
    return f"""\
# {job.title()}
#
# It needs Kubernetes 1.31 or newer, and no operator. Each host is a pod of the Job; the program is in the ConfigMap.
# Replace
#
#   {IMAGE}  by an image with torchrun and legoai{f", and the module {job.factory}" if job.factory else ""};
#   {CLAIM}  by a claim of a volume that all hosts can write. It is the working folder: data, tokenizer and weights
#               are read relative to it, and checkpoints are written there, in runs/{job.name} by default.
#
# and create the objects in your namespace:
#
#   sed -e 's|{IMAGE}|registry/image:tag|' -e 's|{CLAIM}|claim|' {file} | kubectl create -f -
#
# When a pod is stopped, as by the drain of its node, the ranks of all pods finish their step and save. The Job replaces
# the pod, and training goes on from that checkpoint. It does so too when the Job is deleted, and created again. The
# first pod serves the rendezvous: without it the others fail, and are replaced too.
"""


def _config_map(job: Job, name: str) -> str:
    program = textwrap.indent(job.text, "    ")
    return f"""\
apiVersion: v1
kind: ConfigMap
metadata:
  name: {name}
data:
  {_FILE}: |
{program}"""


def _service(name: str) -> str:
    return f"""\
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    job-name: {name}
"""


def _job(job: Job, name: str) -> str:
    settings = {**ENVIRONMENT, **_NEW_STORE, "XDG_CACHE_HOME": f"{_WORK}/.cache"}
    if job.factory:
        settings["PYTHONPATH"] = _WORK
    environment = "\n".join(f'            - name: {name}\n              value: "{to}"' for name, to in settings.items())
    limits = f"{{nvidia.com/gpu: {job.gpus}}}" if job.gpus else "{}"
    return f"""\
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
  labels: {{}}  # with Kueue: kueue.x-k8s.io/queue-name
spec:
  completionMode: Indexed
  completions: {job.hosts}
  parallelism: {job.hosts}
  backoffLimit: {_RESTARTS * job.hosts}  # so many pods may fail by themselves; each is replaced
  podFailurePolicy:
    rules:
      - action: Ignore  # replace pods that Kubernetes has removed, however many
        onPodConditions:
          - type: DisruptionTarget
  template:
    spec:
      subdomain: {name}
      restartPolicy: Never  # of containers in their pod: the Job replaces the pod
      terminationGracePeriodSeconds: {GRACE_SECONDS}
      containers:
        - name: train
          image: {IMAGE}
          workingDir: {_WORK}
          command:
            - sh
            - -euc
            - |
{textwrap.indent(_script(job, _name(job)), " " * 14)}
            - train
          args: []  # options of the trainer, such as ["--save-every", "100"], from which failed ranks go on
          env:  # NCCL_* of your network go here
{environment}
          resources:
            limits: {limits}  # with InfiniBand or RoCE, also the resource of your device plugin
          volumeMounts:
            - {{name: program, mountPath: {_FOLDER}, readOnly: true}}
            - {{name: work, mountPath: {_WORK}}}
            - {{name: shm, mountPath: /dev/shm}}
      volumes:
        - name: program
          configMap: {{name: {name}}}
        - name: work
          persistentVolumeClaim: {{claimName: {CLAIM}}}
        - name: shm  # NCCL and gloo join the processes of a host there
          emptyDir: {{medium: Memory}}
"""


def _script(job: Job, name: str) -> str:
    """The command of a pod. The first one serves the rendezvous, and the others may start much earlier or later."""
    settings = "--rdzv-conf=is_host=$((JOB_COMPLETION_INDEX == 0)),join_timeout=1800,read_timeout=600"
    return "exec " + job.torchrun(
        id=name,
        endpoint=f"{name}-0.{name}:{_PORT}",
        program=f"{_FOLDER}/{_FILE}",
        options=(settings, f"--max-restarts={_RESTARTS}"),
    )
