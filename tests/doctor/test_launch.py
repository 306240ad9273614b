"""The forms in which people hold an engine's command line. Names, folders and addresses are made up."""

from __future__ import annotations

import json
import re
import shlex
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.checks.launch import Launch, find_launch
from kvoffload.model.errors import ConfigError

COMMANDS = re.compile(r"(?:\S*/)?engine serve|engine\.server")
TRANSFER = '{"connector": "ours", "extra": {"bytes": "64GiB"}}'
IN_SHELL = f"export POOL=big\nulimit -n 65536 && exec engine serve M \\\n  --ranks 2 --transfer '{TRANSFER}' 2>&1 | tee /tmp/log\necho ended"
REST = ["M", "--ranks", "2"]
RUN = "docker run --rm --gpus all --ipc=host -p 8000:8000 -v ~/.cache:/root/.cache"


def find(line: str | list[str]) -> Launch:
    return find_launch(shlex.split(line) if isinstance(line, str) else line, COMMANDS, "engine serve MODEL")


@pytest.mark.parametrize(
    "line",
    [
        "engine serve M --ranks 2",
        "/opt/venv/bin/engine serve M --ranks 2",
        "uv run --with x engine serve M --ranks 2",
        "nohup numactl --cpunodebind=0 engine serve M --ranks 2",
        "CUDA_VISIBLE_DEVICES=0,1 engine serve M --ranks 2",
        "env A=b python3 -m engine.server M --ranks 2",
        "torchrun --nproc-per-node 2 -m engine.server M --ranks 2",
        "srun --gres=gpu:2 --container-image=x engine serve M --ranks 2",
        "apptainer exec --nv image.sif engine serve M --ranks 2",
        f"{RUN} img engine serve M --ranks 2",
        f"{RUN} --entrypoint engine img serve M --ranks 2",
        f"{RUN} --entrypoint '/usr/bin/engine serve' img M --ranks 2",
        f"{RUN} --entrypoint python3 img -m engine.server M --ranks 2",
        f"{RUN} img M --ranks 2",
        "sudo docker run -d --name engine-1 --restart unless-stopped --shm-size 16g img:v1 M --ranks 2",
        "docker container run -itd --network host --privileged img@sha256:ab M --ranks 2",
        "docker --context far run --init -eA=b -p8000:80 registry.example.com:5000/x/img:1 M --ranks 2",
        "podman run --replace --device nvidia.com/gpu=all --security-opt=label=disable img M --ranks 2",
        "nerdctl run --env-file /nowhere --gpus=all img M --ranks 2",
        "docker create --gpus all img M --ranks 2",
        "docker service create --name x img M --ranks 2",
        "docker compose run --rm img M --ranks 2",
        "docker compose -f x.yml run -T --no-deps --build img M --ranks 2",
        "podman run --tls-verify --no-hosts --pull=newer img M --ranks 2",
        "apptainer run --nv --bind /a:/b image.sif M --ranks 2",
        "singularity run --env A=b docker://x/img:1 M --ranks 2",
        "apptainer instance run --nv --bind $HOME:/data $SIF name M --ranks 2",
        "kubectl run x --image=img --restart=Never -- M --ranks 2",
    ],
)
def test_the_arguments_are_found_behind_launchers_and_images(line: str) -> None:
    assert list(find(line).arguments) == REST


@pytest.mark.parametrize(
    "words",
    [
        ["bash", "-c", IN_SHELL],
        ["/bin/sh", "-lc", IN_SHELL],
        ["docker", "run", "--entrypoint", "bash", "img", "-c", IN_SHELL],
        ["kubectl", "run", "x", "--image=img", "--command", "--", "sh", "-c", IN_SHELL],
        [IN_SHELL],
    ],
)
def test_a_script_is_read_up_to_the_commands_end(words: list[str]) -> None:
    found = find(words)
    assert list(found.arguments) == [*REST, "--transfer", TRANSFER]
    assert found.environ["POOL"] == "big"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--model", "M", "--ranks", "2"], ["--model", "M", "--ranks", "2"]),
        (["org/m", "--ranks=2"], ["org/m", "--ranks=2"]),
        (["/mnt/models"], ["/mnt/models"]),
        (["s3://bucket/m", "--ranks", "2"], ["s3://bucket/m", "--ranks", "2"]),
        ([json.dumps(["--model", "M", "--transfer", TRANSFER])], ["--model", "M", "--transfer", TRANSFER]),
        (['args: ["--model", "M"]'], ["--model", "M"]),
        ([f"args:\n  - --model=M\n  - '--transfer={TRANSFER}'\n"], ["--model=M", f"--transfer={TRANSFER}"]),
        (["command: --model M --ranks 2"], ["--model", "M", "--ranks", "2"]),
        (["command: >\n  --model M\n  --ranks 2\n"], ["--model", "M", "--ranks", "2"]),
        ([f"command: >-\n  engine serve M\n  --transfer '{TRANSFER}'"], ["M", "--transfer", TRANSFER]),
    ],
)
def test_a_pods_args_and_composes_command_are_the_arguments(words: list[str], wanted: list[str]) -> None:
    assert list(find(words).arguments) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "#!/bin/sh\n# it's for two GPUs\nengine serve M --ranks 2  # don't raise it",
        "engine serve M \\ \n  --ranks 2\r\n",
        "MODEL=${MODEL:-M}\nengine serve $MODEL --ranks ${RANKS-2} ${MORE:-}",
        "MORE='--ranks 2'\nengine serve M $MORE",
        'MORE=(\n  --ranks 2\n)\nengine serve M "${MORE[@]}"',
        "ExecStart=/usr/bin/engine serve M --ranks 2",
        "[Unit]\nDescription=engine\n[Service]\nExecStart=-/opt/bin/engine serve M --ranks 2\nRestart=always\n",
        "cat > Dockerfile <<E\nFROM img\nE\nengine serve M --ranks 2",
        "$ engine serve M --ranks 2",
        "(cd /x && engine serve M --ranks 2) &",
        "docker run --gpus all `\n  img `\n  M --ranks 2",
        "docker run --gpus all ^\n  img ^\n  M --ranks 2",
        'CMD ["engine", "serve", "M", "--ranks", "2"]',
        'ENTRYPOINT ["engine", "serve", "M", "--ranks", "2"]',
        "# of the pod\ncommand: [engine, serve]\nargs:\n- M\n# as many as there are GPUs\n- --ranks # of one node\n- 2\n",
        "entrypoint: [engine]\ncommand: serve M --ranks 2\n",
        'command: ["/bin/sh", "-c"]\nargs:\n- |\n  engine serve M \\\n    --ranks 2\n',
    ],
)
def test_scripts_and_container_files_are_read(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL", "RANKS", "MORE"):
        monkeypatch.delenv(name, raising=False)
    assert list(find([text]).arguments) == REST


MANY = 1_000_000


@pytest.mark.parametrize(
    "before",
    [
        pytest.param("\n" * MANY, id="blank lines"),
        pytest.param("x\n" + "\n " * MANY, id="blank lines after a command"),
        pytest.param("A=(\n" * (MANY // 10), id="arrays that are not closed"),
        pytest.param(
            "".join(f'A{n}=("${{A{n - 1}[@]}}" "${{A{n - 1}[@]}}")\n' for n in range(99, 0, -1))
            + '"${A99[@]}"',
            id="arrays of arrays",
        ),
    ],
)
def test_a_script_is_read_in_time_proportional_to_its_length(before: str) -> None:
    """With time that grows with the square of the length, each case would take minutes or more."""
    assert list(find([f"{before}\nengine serve M --ranks 2"]).arguments) == REST


POD = """
apiVersion: v1
kind: Service
metadata: {name: x}
---
apiVersion: apps/v1
kind: Deployment
spec:
  template:
    spec:
      initContainers: [{name: check, command: [kvoffload, doctor], args: [--x, --, engine, serve, N]}]
      containers:
        - name: side
          image: nginx
        - name: engine
          image: img
          %s
          env:
            - {name: A, value: b}
            - {name: TOKEN, valueFrom: {secretKeyRef: {name: x, key: y}}}
"""


@pytest.mark.parametrize(
    "text",
    [
        "services:\n  x: {image: nginx}\n  engine:\n    image: img\n    environment: {A: b, TOKEN: }\n    command: M --ranks 2\n",
        "# ours\nimage: img\nenvironment: [A=b, TOKEN]\nentrypoint: [engine, serve]\ncommand: >\n  M\n  --ranks 2\n",
        '{"image": "img", "environment": [{"name": "A", "value": "b"}], "command": ["M", "--ranks", "2"]}',
        POD % "args: [M, --ranks, '2']",
        POD % "command: [engine, serve]\n          args: [M, --ranks, '2']",
        POD % "command: [sh, -c]\n          args: ['exec engine serve M --ranks 2']",
        "- image: img\n  args: [M, --ranks, '2']\n  env: [{name: A, value: b}]\n",
        '# syntax\nARG A\nFROM big AS first\nENV A=c\nCMD x\nFROM img\nENV A=b\nRUN pip install x\nCMD ["M", \\\n  "--ranks", "2"]\n',
        "FROM img\nENV A b\nENTRYPOINT engine serve M --ranks 2\n",
        'from --platform=linux/amd64 img\nenv A b\ncmd ["M", \\\n  # on one node\n  "--ranks", "2"]\n',
        'FROM img AS base\nENV A=b\nCMD ["M", "--ranks", "2"]\nFROM x AS tools\nCMD y\nFROM base AS last\nRUN make\n',
        'FROM img AS base\nENV A=b\nCMD --port 1\nFROM base\nENTRYPOINT ["engine", "serve", "M", "--ranks", "2"]\n',
    ],
)
def test_a_whole_file_of_containers_is_read_with_image_and_environment(text: str) -> None:
    found = find([text])
    assert (list(found.arguments), found.image, found.environ) == (REST, "img", {"A": "b"})


def test_a_pods_variable_can_come_from_a_config_map_in_the_same_text() -> None:
    variables = "".join(
        f"    - name: {name}\n      valueFrom: {{configMapKeyRef: {{name: settings, key: {key}}}}}\n"
        for name, key in (("MODEL", "model"), ("OTHER", "absent"))
    )
    pod = f"kind: Pod\nspec:\n  containers:\n  - image: img\n    args: [$(MODEL), --id=$(OTHER)]\n    env:\n{variables}"
    settings = "kind: ConfigMap\nmetadata: {name: settings}\ndata: {model: M}\n"
    for text in (f"{pod}---\n{settings}", f"{settings}---\n{pod}"):
        assert find([text]).arguments == ("M", "--id=$(OTHER)")
        assert find([text.replace("absent", "[absent]")]).arguments == ("M", "--id=$(OTHER)")


SERVICE = """
kind: LLMInferenceService
spec:
  model: {uri: "hf://org/m", name: m}
  router: {scheduler: {template: {containers: [{name: main, args: [--pool, x]}]}}}
  parallelism: {tensor: 2}
  template:
    containers:
      - {name: side, env: [{name: A, value: c}]}
      - name: main
        image: img
        env: [{name: A, value: b}, {name: VLLM_ADDITIONAL_ARGS, value: "--x '{\\"y\\": 1}'"}]
"""


def test_kserves_own_script_gives_an_inference_service_its_arguments() -> None:
    wanted = ["/mnt/models", "--tensor-parallel-size", "2", "--x", '{"y": 1}']
    for text in (SERVICE, SERVICE + "  prefill: {template: {containers: main}}\n"):
        found = find([text])
        assert (list(found.arguments), found.image, found.environ["A"]) == (wanted, "img", "b")
    assert list(find([f"{SERVICE}        args: [--z]\n"]).arguments) == [*wanted, "--z"]
    assert list(find([f"{SERVICE}        command: [engine, serve, M]\n"]).arguments) == ["M"]
    prefill = "  prefill: {template: {containers: [{name: main, image: other}]}}\n"
    with pytest.raises(ConfigError, match=r"each of 2 containers could be the engine's \(img, other\)"):
        find([SERVICE + prefill])


@pytest.mark.parametrize(
    ("before", "after", "unread"),
    [
        ("  model:", "  baseRefs: [{name: fast}]\n  model:", "$(spec.baseRefs)"),
        ("  model:", "  runtime: another\n  model:", "$(spec.runtime)"),
        ("tensor: 2", "tensor: 2, data: 4", "$(parallelism.data)"),
        ("  model:", "  worker: {containers: [{name: main, image: img}]}\n  model:", "$(worker)"),
    ],
)
def test_what_kserve_adds_from_elsewhere_is_not_known(before: str, after: str, unread: str) -> None:
    found = find([SERVICE.replace(before, after)])
    assert (found.image, found.placeholders) == ("img", [unread])


def test_a_unit_of_systemd_sets_variables() -> None:
    found = find(['[Service]\nEnvironment="A=b c" D=e\nExecStart=engine serve M\n'])
    assert {"A": "b c", "D": "e"}.items() <= found.environ.items()


def test_the_container_with_the_engines_command_is_chosen_and_others_are_a_problem() -> None:
    other = "  x: {image: first, command: --port 80}\n"
    ours = "  y: {image: second, command: engine serve M}\n"
    assert find([f"services:\n{other}{ours}"]).image == "second"
    for one, images in ((other, "first, third"), (ours, "second, third")):
        another = re.sub("  .: {image: [a-z]+", "  z: {image: third", one)
        with pytest.raises(ConfigError, match=rf"each of 2 containers could be the engine's \({images}\)"):
            find([f"services:\n{one}{another}"])
    assert find([f"services:\n{ours}{ours.replace('y', 'z')}"]).image == "second"


def test_a_dollar_sign_that_compose_must_not_replace_is_that_of_the_containers_own_variable() -> None:
    text = "image: img\nenvironment: {COUNT: 2}\ncommand: sh -c 'engine serve M --ranks $${COUNT}'\n"
    assert list(find([text]).arguments) == REST


def test_a_file_that_is_named_is_not_opened_and_the_error_says_how_to_give_its_text(tmp_path: Path) -> None:
    script = tmp_path / "start.sh"
    script.write_text("engine serve M")
    with pytest.raises(ConfigError, match=re.escape(f'"$(cat {script})"')):
        find(["bash", str(script)])


def test_the_image_and_its_environment_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "of this machine")
    monkeypatch.setenv("ALLOCATOR", "of this machine")
    (tmp_path / "env").write_text("# a comment\nC=3\nTOKEN\n")
    found = find(f"ALLOCATOR=x docker run -e A=1 --env=B=2 --env-file {tmp_path}/env img engine serve M")
    assert found.image == "img"
    assert found.whole_environ == {"A": "1", "B": "2", "C": "3", "TOKEN": "of this machine"}
    here = find("A=1 engine serve M")
    assert (here.image, here.whole_environ["ALLOCATOR"], here.whole_environ["A"]) == (
        "",
        "of this machine",
        "1",
    )


def test_variables_are_replaced_if_their_value_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", "org/m")
    monkeypatch.delenv("RANKS", raising=False)
    found = find(
        [
            "sh",
            "-c",
            "PORT=8000 engine serve $MODEL --port ${PORT} --ranks $RANKS --id=$(POD_IP) $@ -n `nproc`",
        ]
    )
    known = ("org/m", "--port", "8000")
    assert found.arguments == (*known, "--ranks", "$RANKS", "--id=$(POD_IP)", "$@", "-n", "`nproc`")
    assert found.placeholders == ["$RANKS", "--id=$(POD_IP)", "$@", "`nproc`"]


@pytest.mark.parametrize(
    "words",
    [
        ["bash", "start.sh"],
        ["./start.sh", "--ranks", "2"],
        ["python", "client.py", "--model", "M"],
        ["engine", "bench", "serve"],
        ["engine"],
        ["docker", "run"],
        ["docker", "run", "--rm"],
        ["docker", "run", "ubuntu", "ls", "folder"],
        ["sh", "-c", "engine serve 'M"],
        [""],
        ["a: &a\n  b: *a\n"],
        ["a: &0 [x]\n" + "".join(f"b{n}: &{n} [{', '.join([f'*{n - 1}'] * 9)}]\n" for n in range(1, 8))],
        ["a: &0 [x]\n" + "".join(f"b{n}: &{n} [*{n - 1}, *{n - 1}]\n" for n in range(1, 19)) + "args: [*18]"],
        ["args: !!int ''"],
        ["args: !!bool what"],
        ["args: \x00"],
        ["{" + '"a": {' * 300 + "}" * 301],
        ["[1, 2"],
        ["engine\x0bserve"],
        ["sh", "-c", "engine\u00a0serve M"],
    ],
)
def test_a_line_that_does_not_start_the_engine_is_one_problem(words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        find(words)
    assert len(raised.value.problems) == 1


def doubled(line: str) -> str:
    """Return YAML in which each of 18 anchors has the one before it twice: a megabyte, which PyYAML could still write out."""
    return "a0: &0 {x: y}\n" + "".join(line.format(new=n, old=n - 1) for n in range(1, 19))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(doubled("a{new}: &{new} {{<<: [*{old}, *{old}]}}\n"), id="merge keys"),
        pytest.param(doubled("a{new}: &{new} {{<<: *{old}, b: *{old}}}\n"), id="a merge key and an alias"),
        pytest.param(doubled("a{new}: &{new} [*{old}, *{old}]\n"), id="aliases"),
        pytest.param(f"a: &0 {'x' * 50_000}\nb: [{', '.join(['*0'] * 10_000)}]\n", id="a long text"),
        pytest.param("a: &0 {b: *0}\n", id="a value that has itself as a part"),
    ],
)
@pytest.mark.parametrize("start", ["image: img\nargs: [M]\n{}", "# ours\n---\nkind: x\n---\n{}"])
def test_yaml_whose_aliases_repeat_too_much_is_one_problem(text: str, start: str) -> None:
    with pytest.raises(ConfigError) as raised:
        find([start.format(text)])
    (problem,) = raised.value.problems
    assert "with its aliases written out, it may have 1,048,576 characters" in problem


def test_anchors_and_merge_keys_of_compose_files_are_read() -> None:
    text = (
        "x-all: &all {image: img, environment: &more {A: b}}\nx-ranks: &ranks --ranks 2\n"
        "services:\n  engine:\n    <<: [*all]\n    environment: {<<: *more, C: *ranks}\n    command: M --ranks 2\n"
    )
    found = find([text])
    assert (list(found.arguments), found.image) == (REST, "img")
    assert found.environ == {"A": "b", "C": "--ranks 2"}


PARTS = [
    *(
        "engine serve M",
        "engine",
        "serve",
        "run",
        "docker run",
        "kubectl run --image=x --",
        "apptainer run x.sif",
    ),
    *(
        "A=(",
        "A=",
        "${A[@]}",
        "${A:-",
        "}",
        "$A",
        "$(",
        "args:",
        "image: x",
        "FROM x",
        "environment: {a: ",
        "---",
        "kind: ConfigMap\nmetadata: ",
        "command: [",
        "- ",
        "#",
        "--entrypoint",
        "-e",
    ),
    *("'", '"', "\\", "\n", " ", ")", "]", "{", ": ", "&", "!!int x", "*x", "? ", "CMD", "\u00a0", "--"),
]


@given(
    st.lists(
        st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=12).map("".join),
        min_size=1,
        max_size=4,
    )
)
def test_property_any_line_is_read_or_refused(words: list[str]) -> None:
    with suppress(ConfigError):
        assert all(isinstance(word, str) for word in find(words).arguments)
