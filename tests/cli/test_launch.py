"""`meshwright launch`: scripts that a shell and Kubernetes accept, with the run's own words; errors before any file."""

from __future__ import annotations

import copy
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from meshwright.config.source import to_toml
from meshwright.errors import MeshwrightError
from meshwright.plan.rules import load
from meshwright.train.launch.cluster_job import to_yaml
from tests.cli.cluster_stand_ins import directives, expand
from tests.cli.jobset_schema import breaches
from tests.helpers import alternatives, rank_context, shown_error

PAGE = Path(__file__).parents[2] / "docs/clusters.md"
SIZE = ["--nodes", 2, "--gpus-per-node", 2]
POD = ["--image", "ghcr.io/lab/meshwright:0.1", "--volume", "runs"]
MESHES = [["mesh.dp_shard=4"], ["mesh.tp=2", "mesh.dp_replicate=2"], ["mesh.pp=4", "train.num_microbatches=4"]]
AWKWARD = [
    "mesh.dp_shard=4",
    "data.source=my data/*.txt",
    'name=it\'s $HOME "$(RANK)" `id` $$ & ü; #',
    'train.freeze=["embed.*"]',
]
TARGETS = {"slurm": [], "kubernetes": POD, "torchrun": []}


def write(here, target, *words):
    done = here("launch", target, "llama-tiny", *words, *SIZE, *TARGETS[target])
    assert done.returncode == 0, done.stderr
    return done.stdout


def line_of(script, command):
    [line] = [line for line in script.splitlines() if line.startswith(command)]
    return shlex.split(line)


def pod_of(manifest):
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def is_shell(text):
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    return done.returncode == 0 and done.stderr == ""


@pytest.mark.parametrize(("target", "words"), [*zip(TARGETS, MESHES, strict=True)])
def test_scripts_have_the_size_of_the_mesh(here, target, words):
    text = write(here, target, *words)
    axes = load("llama-tiny", words).mesh.axes()
    assert f"# llama-tiny: 2 nodes × 2 GPUs = 4 ranks ({axes})" in text
    if target == "kubernetes":
        assert is_shell(pod_of(yaml.safe_load(text))["containers"][0]["command"][2])
    else:
        assert is_shell(text)


def test_a_shell_error_would_be_seen():
    assert not is_shell("if x; then") and not is_shell("echo 'a")


@pytest.mark.parametrize("more", [[], ["--time", "2:00:00", "--partition", "gpu,long", "--account", "a-1"]])
def test_sbatch_directives(here, more):
    text = write(here, "slurm", "mesh.dp_shard=4", "--name", "my.Run_1", *more)
    found = directives(text)
    assert is_shell(text) and text.startswith("#!/bin/bash\n")
    expected = {"job-name": "my.Run_1", "nodes": "2", "ntasks-per-node": "2", "gpus-per-node": "2",
                "output": "%x-%j.out", "open-mode": "append", "requeue": "", "signal": "TERM@120"}  # fmt: skip
    assert found == expected | {name[2:]: value for name, value in zip(more[::2], more[1::2], strict=True)}


@pytest.mark.parametrize("words", [*MESHES, AWKWARD])
def test_words_arrive_as_they_were_given(here, words):
    run = ["run", "llama-tiny", *words, "--out", "runs/a", "--resume", "auto"]
    script = write(here, "slurm", *words, "--name", "a")
    assert line_of(script, "srun") == ["srun", "--label", "--wait=60", "meshwright", *run]
    lines = write(here, "torchrun", *words, "--name", "a").splitlines()
    for line in lines[2::2]:
        assert shlex.split(line)[-len(run) - 2 :] == ["-m", "meshwright", *run]
    container = pod_of(yaml.safe_load(write(here, "kubernetes", *words, "--name", "a")))["containers"][0]
    assert [expand(word, {"RANK": "0"}) for word in container["args"]] == run
    assert load("llama-tiny", run[2:-4]) == load("llama-tiny", words)


def test_the_preset_may_be_left_out_as_in_run(here):
    done = here("launch", "slurm", "mesh.dp_shard=4", *SIZE)
    assert line_of(done.stdout, "srun")[3:6] == ["meshwright", "run", "mesh.dp_shard=4"]


def test_a_run_folder_goes_on_in_itself(here, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old/config.toml").write_text(to_toml(load(None, ["mesh.dp_shard=2"])), "utf-8")
    done = here("launch", "slurm", "old", "mesh.dp_shard=4", *SIZE)
    assert line_of(done.stdout, "srun")[3:] == ["meshwright", "run", "old", "mesh.dp_shard=4"]


def test_torchrun_lines(here):
    lines = write(here, "torchrun", "mesh.dp_shard=4").splitlines()
    assert lines[1::2] == ["# node 0", "# node 1"]
    for node, line in enumerate(lines[2::2]):
        assert line.startswith(
            f'torchrun --nnodes 2 --node-rank {node} --master-addr "${{HEAD_NODE:?}}" --master-port 29500 '
            "--nproc-per-node 2 -m meshwright run llama-tiny mesh.dp_shard=4 "
        )
    assert "--master-addr node-1.lab " in write(here, "torchrun", "mesh.dp_shard=4", "--host", "node-1.lab")
    one = here("launch", "torchrun", "mesh.dp_shard=4", "--nodes", 1, "--gpus-per-node", 4).stdout.splitlines()
    assert len(one) == 2 and one[1].startswith("torchrun --standalone --nproc-per-node 4 -m meshwright run ")


def test_a_jobset_field_by_field(here):
    assert write(here, "kubernetes", "mesh.dp_shard=4", "--name", "a" * 48), "with -node-0-1-abcde it has 63 characters"
    manifest = yaml.safe_load(write(here, "kubernetes", "mesh.dp_shard=4", "--name", "my-run"))
    assert breaches(manifest, "JobSet") == []
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert manifest["metadata"] == {"name": "my-run"}
    spec = manifest["spec"]
    assert spec["network"] == {"enableDNSHostnames": True}
    assert spec["failurePolicy"]["maxRestarts"] > 0
    [rule] = spec["failurePolicy"]["rules"]
    assert rule == {"name": "invalidInput", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    [replicated] = spec["replicatedJobs"]
    assert replicated["replicas"] == 1
    job = replicated["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["completionMode"], job["backoffLimit"]) == (2, 2, "Indexed", 0)
    assert job["podFailurePolicy"]["rules"] == [
        {"action": "FailJob", "onExitCodes": {"containerName": "ranks", "operator": "In", "values": [2]}}
    ]
    pod = pod_of(manifest)
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] == 120
    [container] = pod["containers"]
    assert container["name"] == "ranks" and container["image"] == "ghcr.io/lab/meshwright:0.1"
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    assert {one["name"]: one["value"] for one in container["env"]} == {
        "MASTER_ADDR": f"my-run-{replicated['name']}-0-0.my-run", "MASTER_PORT": "29500",
        "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
    }  # fmt: skip
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert mounts == {"work": container["workingDir"], "shm": "/dev/shm"}
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    assert {"name": "work", "persistentVolumeClaim": {"claimName": "runs"}} in pod["volumes"]


def seed(manifest, path, value):
    *parents, last = path
    for name in parents:
        manifest = manifest[name]
    manifest[last] = value


JOB = ("spec", "replicatedJobs", 0, "template", "spec")
CONTAINER = (*JOB, "template", "spec", "containers", 0)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "maxRestarts"), 3),
        (("spec", "network", "enableDNSHostName"), True),
        (("spec", "failurePolicy", "rules", 0, "action"), "FailJob"),
        ((*JOB, "restartPolicy"), "Never"),
        ((*JOB, "parallelism"), "2"),
        ((*JOB, "completionMode"), "indexed"),
        ((*JOB, "podFailurePolicy", "rules", 0, "onExitCodes", "values"), 2),
        ((*CONTAINER, "limits"), {"nvidia.com/gpu": 2}),
        ((*CONTAINER, "env", 0, "value"), 29500),
        ((*CONTAINER, "args"), "run"),
        ((*JOB, "template", "spec", "volumes", 0, "claimName"), "runs"),
    ],
)
def test_the_schema_catches(here, path, value):
    manifest = yaml.safe_load(write(here, "kubernetes", "mesh.dp_shard=4"))
    wrong = copy.deepcopy(manifest)
    seed(wrong, path, value)
    assert breaches(manifest, "JobSet") == [] != breaches(wrong, "JobSet")


def test_a_file_goes_into_the_manifest_and_by_its_path_into_scripts(here, tmp_path):
    text = '# 4 ranks, "quoted": yes\nname = "mine"\n\n[model]\nkind = "llama"\n[mesh]\ndp_shard = 2\n'
    (tmp_path / "a file.toml").write_text(text)
    (tmp_path / "run.toml").write_text(text)
    done = here("launch", "slurm", "a file.toml", "mesh.tp=2", *SIZE)
    assert line_of(done.stdout, "srun")[4:7] == ["run", "a file.toml", "mesh.tp=2"]
    assert directives(done.stdout)["job-name"] == "mine"
    done = here("launch", "kubernetes", "./run.toml", "mesh.tp=2", *SIZE, *POD)
    config_map, manifest = yaml.safe_load_all(done.stdout)
    assert breaches(config_map, "ConfigMap") == breaches(manifest, "JobSet") == []
    assert config_map["kind"] == "ConfigMap" and config_map["data"] == {"run.toml": text}
    pod = pod_of(manifest)
    [container] = pod["containers"]
    assert container["args"][:3] == ["run", "/etc/meshwright/run.toml", "mesh.tp=2"]
    assert {"name": "config", "mountPath": "/etc/meshwright"} in container["volumeMounts"]
    assert {"name": "config", "configMap": {"name": config_map["metadata"]["name"]}} in pod["volumes"]


@pytest.mark.parametrize(("target", "command"), [("slurm", "sbatch"), ("kubernetes", "kubectl apply -f")])
def test_a_file_is_written_and_said_how_to_submit(here, tmp_path, target, command):
    text = write(here, target, "mesh.dp_shard=4")
    said = write(here, target, "mesh.dp_shard=4", "-o", "my job")
    assert (tmp_path / "my job").read_text() == text
    first, memory, devices, last = said.splitlines()
    assert first == text.splitlines()[target == "slurm"][2:] and last == f"start it with: {command} 'my job'"
    assert memory.startswith("maximum memory of a rank ") and devices.startswith("  fits A100-40")


@pytest.mark.parametrize(
    ("preset", "words", "size"),
    [
        ("llama-tiny", [], (2, 8)),
        ("llama-tiny", ["mesh.dp_shard=4"], (1, 2)),
        ("llama-tiny", ["mesh.dp_shard=3", "train.global_batch=6"], (2, 1)),
        ("llama3-70b", ["mesh.dp_shard=8", "mesh.tp=8"], (4, 8)),
        ("llama-tiny", ["mesh.pp=4", "train.num_microbatches=4"], (1, 3)),
        ("moe-tiny", ["mesh.dp_shard=4", "mesh.ep=4"], (2, 4)),
        ("llama-tiny", ["mesh.dp_shard=2", "mesh.tp=2"], (7, 1)),
        ("llama-tiny", ["mesh.dp_replicate=2", "mesh.tp=2", "mesh.pp=2", "train.num_microbatches=4"], (3, 3)),
    ],
)
def test_fixes_of_a_wrong_size_work(here, tmp_path, preset, words, size):
    target = list(TARGETS)[size[0] % len(TARGETS)]
    nodes, gpus = size
    more = [*TARGETS[target], "-o", tmp_path / "script"]
    done = here("launch", target, preset, *words, "--nodes", nodes, "--gpus-per-node", gpus, *more)
    assert done.returncode == 2 and done.stdout == "" and not (tmp_path / "script").exists()
    error = shown_error(done.stderr)
    assert f"{nodes} × {gpus} GPUs are {nodes * gpus} ranks" in error["error"]
    ways = alternatives(error["fix"])
    assert ways or "--nodes" in error["fix"]
    for way in ways:
        done = here("launch", target, preset, *words, *way, "--nodes", nodes, "--gpus-per-node", gpus, *more)
        assert done.returncode == 0, done.stderr
    if found := re.search(r"--nodes (\d+)", error["fix"]):
        done = here("launch", target, preset, *words, "--nodes", found[1], "--gpus-per-node", gpus, *more)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("target", "more", "what"),
    [
        ("slurm", ["--name", "a b"], "--name 'a b'"),
        ("slurm", ["--name", "a\n#SBATCH --x"], "--name"),
        ("slurm", ["--time", "tomorrow"], "--time 'tomorrow'"),
        ("slurm", ["--account", ""], "--account ''"),
        ("slurm", ["mesh.tp=3"], "does not divide"),
        ("kubernetes", ["--name", "My_Run"], "--name 'My_Run'"),
        ("kubernetes", ["--name", "a" * 49], "--name"),
        ("kubernetes", ["--volume", "Runs"], "--volume 'Runs'"),
        ("kubernetes", ["--image", "a b"], "--image 'a b'"),
        ("torchrun", ["--host", "$(id)"], "--host '$(id)'"),
    ],
)
def test_bad_input_is_named_before_anything_is_written(here, tmp_path, target, more, what):
    done = here("launch", target, "mesh.dp_shard=4", *SIZE, *TARGETS[target], *more, "-o", tmp_path / "script")
    error = shown_error(done.stderr)
    assert done.returncode == 2 and done.stdout == "" and not (tmp_path / "script").exists()
    assert what in error["error"]


@pytest.mark.parametrize(
    "words", [["pbs"], ["slurm"], ["slurm", "--nodes", 2], ["slurm", "--nodes", 0, "--gpus-per-node", 1],
              ["kubernetes", *SIZE], ["torchrun", *SIZE, "--partition", "x"]],
)  # fmt: skip
def test_wrong_usage_is_bad_input(here, words):
    done = here("launch", *words)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr


def test_a_folder_that_is_missing_is_named(here, tmp_path):
    done = here("launch", "slurm", "mesh.dp_shard=4", *SIZE, "-o", tmp_path / "no" / "script")
    assert done.returncode == 2 and "folder not found" in shown_error(done.stderr)["error"]


def test_a_plan_that_is_wrong_is_refused(here, monkeypatch):
    def wrong(plan, *, where):
        raise MeshwrightError("the plan adds nothing up", where=where, rule="r", fix="f")

    monkeypatch.setattr("meshwright.plan.verify.verify", wrong)
    done = here("launch", "slurm", "mesh.dp_shard=4", *SIZE)
    assert "the plan adds nothing up" in done.stderr and done.stdout == ""


def test_the_docs_show_what_the_commands_write(here, tmp_path):
    blocks = re.findall(r"```\w*\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    commands = [at for at, block in enumerate(blocks) if re.match(r"meshwright launch \w+ ", block)]
    assert {blocks[at].split()[2] for at in commands} == set(TARGETS)
    for at in commands:
        words = shlex.split(blocks[at].replace("\\\n", " "))[1:]
        done = here(*words)
        assert done.returncode == 0, done.stderr
        written = (tmp_path / words[words.index("-o") + 1]).read_text() if "-o" in words else done.stdout
        assert blocks[at + 1] == written, blocks[at]
    [shown] = [block for block in blocks if block.startswith("error ")]
    wrong = here("launch", "slurm", "llama3-70b", "mesh.dp_shard=8", "mesh.tp=8", "--nodes", 2, "--gpus-per-node", 8)
    assert wrong.stderr == shown


TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.sampled_from(["yes", "No", "null", "~", "1.5", "0x10", "12:30", "2024-01-01", "a\nb\n", "\na", "a \nb", ""]),
)


@given(st.lists(st.dictionaries(TEXTS, st.one_of(TEXTS, st.booleans(), st.integers(), st.lists(TEXTS))), min_size=1))
def test_manifests_are_read_as_the_values_that_they_were_written_from(documents):
    assert list(yaml.safe_load_all(to_yaml(documents))) == documents


def test_scripts_are_blocks_and_nothing_is_an_alias():
    words = ["--out", "mesh.tp=2"]
    value = {"script": "if x; then\n\n    y\nfi\n", "a": words, "b": words}
    assert to_yaml([value, {"c": "yes"}]) == (
        "script: |\n  if x; then\n\n      y\n  fi\na:\n- --out\n- mesh.tp=2\nb:\n- --out\n- mesh.tp=2\n---\nc: 'yes'\n"
    )


def test_a_rank_of_torchrun_knows_whether_its_plan_was_given(here, tmp_path, monkeypatch, corpus):
    specs = []
    monkeypatch.setattr("meshwright.train.launch.launcher.context_from_environment", rank_context)
    monkeypatch.setattr("meshwright.train.launch.launcher.run_as_rank", lambda _, __, spec: specs.append(spec))
    for name, words in (("same", []), ("other", ["recompute.policy=full"])):
        assert here("plan", "llama-tiny", *corpus, *words, "-o", tmp_path / f"{name}.json").returncode == 0
        done = here("run", "llama-tiny", *corpus, "--plan", tmp_path / f"{name}.json", "--quiet", torch=True)
        assert done.returncode == 0, done.stderr
    assert [spec.plan_given for spec in specs] == [False, True] and all(spec.process_bytes is None for spec in specs)
