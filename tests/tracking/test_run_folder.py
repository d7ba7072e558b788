"""A run's folder never mixes two runs, says what it needs, and keeps no secrets."""

import errno
import fcntl
import json
import os
import platform
import random
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from groupwise.chat import settings_for_model
from groupwise.config.schema import Config
from groupwise.data.prompts import resolve_system
from groupwise.errors import ConfigError, TrainingError
from groupwise.tracking import RunFolder
from groupwise.tracking.environment import code_revision, processor_name
from groupwise.tracking.files import json_text
from groupwise.tracking.reading import answer_style, read_run
from groupwise.tracking.run_folder import check_new, cut_back
from groupwise.tracking.text import HIDDEN, hide_secrets, hide_secrets_in_command, hide_shaped_secrets


def test_it_holds_the_resolved_config_and_the_environment(tmp_path):
    config = Config.model_validate({"training": {"seed": 7}, "data": {"split_seed": 3}})
    folder = RunFolder.create(config, tmp_path / "new" / "run", "quickstart", command=["groupwise", "train", "quickstart"])
    assert Config.model_validate(yaml.safe_load(folder.config.read_text())) == config
    environment = json.loads(folder.environment.read_text())
    assert environment["recipe"] == "quickstart"
    assert environment["seeds"] == {"training.seed": 7, "data.split_seed": 3, "evaluation.seed": config.evaluation.seed}
    assert environment["command"] == ["groupwise", "train", "quickstart"]
    assert environment["python"] == sys.version.split()[0]
    assert {"torch", "transformers", "groupwise", "platform", "cpus", "usable_cpus", "code"} <= environment.keys()
    assert environment["processor"] == processor_name()


def test_a_run_is_asked_in_the_style_that_it_found_wherever_its_data_lie(tmp_path, monkeypatch, caplog):
    """``prompt.system: auto`` looks at the columns of the training file, which may be gone or relative to another folder."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "hard.jsonl").write_text('{"problem": "1 + 1?", "answer": "2", "difficulty": "3/8"}\n')
    monkeypatch.chdir(tmp_path / "data")
    config = Config.model_validate({"data": {"source": "hard.jsonl", "holdout": 0}})
    folder = RunFolder.create(config, tmp_path / "run", "x")
    folder.final_model.mkdir()
    monkeypatch.chdir(tmp_path)

    def style(*overrides):
        found, _ = settings_for_model(str(folder.path), overrides)
        return resolve_system(found.prompt, found.data)[1]

    assert style() == style("data.eval_source=math500") == style("prompt.system=none") == "boxed"
    record = read_run(folder.path)
    assert answer_style(record.config) == "boxed"
    assert not caplog.records
    assert style("data.source=gsm8k") == "xml", "other data have their own"
    folder.add_to_environment(answer_style="\x1b[31m")
    assert style() == "xml"
    assert "data source 'hard.jsonl' is not here" in caplog.text


def test_a_processor_is_called_what_linux_calls_it(monkeypatch):
    about = "processor\t: 0\nmodel name\t: AMD EPYC\nprocessor\t: 1\nmodel name\t: AMD EPYC\n"
    for text, name in ((about, "AMD EPYC"), ("model name\t:\n", platform.machine())):
        monkeypatch.setattr(Path, "read_text", lambda path, text=text, **_: text)
        assert processor_name() == name


def test_it_refuses_a_folder_that_holds_something_and_leaves_it_alone(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("old")
    with pytest.raises(ConfigError, match=r"not empty.*output\.folder"):
        RunFolder.create(Config(), tmp_path, "x")
    assert os.listdir(tmp_path) == ["metrics.jsonl"]
    assert (tmp_path / "metrics.jsonl").read_text() == "old"


def test_an_empty_folder_is_welcome(tmp_path):
    assert RunFolder.create(Config(), tmp_path, "x").config.exists()


def test_a_file_in_its_place_is_named(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match=r"run' is a file"):
        RunFolder.create(Config(), tmp_path / "run", "x")


def test_a_place_that_may_not_be_looked_into_is_named(tmp_path, deny):
    deny("exists")
    with pytest.raises(ConfigError, match=r"closed/run' cannot be written \(Permission denied: .*output\.folder"):
        check_new(tmp_path / "closed" / "run")


def test_a_name_that_is_not_utf_8_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    for name in (b"r\xff", b"r\xff/run"):
        with pytest.raises(ConfigError, match=r"udcff.*not UTF-8.*output\.folder"):
            RunFolder.create(Config(), tmp_path / os.fsdecode(name), "x")
    assert os.listdir(tmp_path) == []
    place = tmp_path / os.fsdecode(b"r\xff")
    place.mkdir()
    monkeypatch.chdir(place)
    for path in (None, Path("run")):  # the library makes it absolute
        with pytest.raises(ConfigError, match="not UTF-8"):
            RunFolder.create(Config(), path, "x")
    assert os.listdir(place) == []


@pytest.mark.parametrize("content", ["", '{"id": "ab', "[]", "null", "[" * 100_000, None])
def test_a_run_goes_on_without_what_a_damaged_environment_said(tmp_path, content):
    RunFolder.create(Config(), tmp_path / "run", "x").release()
    folder = RunFolder.reopen(tmp_path / "run")
    assert folder is not None
    folder.environment.unlink() if content is None else folder.environment.write_text(content)
    assert folder.read_environment() == {}
    assert len(folder.tracking_id) == 12
    folder.add_to_environment(kernels=["one"])
    assert json.loads(folder.environment.read_text()) == {"kernels": ["one"]}


def test_two_runs_with_damaged_environments_are_two_runs_to_a_service(tmp_path):
    assert RunFolder(tmp_path / "a").tracking_id != RunFolder(tmp_path / "b").tracking_id


def test_what_stands_in_a_place_of_the_run_s_own_is_named(tmp_path):
    for name, said in (
        ("evaluations", "evaluations' cannot be written.*File exists"),
        ("environment.json", "json'.*Is a directory"),
    ):
        folder = RunFolder.create(Config(), tmp_path / name / "run", "x")
        folder.release()
        if name == "evaluations":
            folder.evaluations.rmdir()
            folder.evaluations.write_text("")
        else:
            folder.environment.unlink()
            folder.environment.mkdir()
            assert folder.read_environment() == {}
            with pytest.raises(TrainingError, match=said):
                folder.add_to_environment(kernels=[])
        for _ in range(2):  # the lock is let go
            with pytest.raises(TrainingError, match=said):
                RunFolder.reopen(folder.path)


def test_a_place_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written.*writable"):
        RunFolder.create(Config(), tmp_path / "file" / "run", "x")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("")
    with pytest.raises(ConfigError, match="'runs' cannot be written"):
        RunFolder.create(Config(), None, "x")


def test_a_folder_that_could_not_be_begun_may_be_tried_again(tmp_path, monkeypatch):
    def full(self, *given):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_start", full)
        with pytest.raises(ConfigError, match="No space left"):
            RunFolder.create(Config(), tmp_path / "run", "x")
    RunFolder.create(Config(), tmp_path / "run", "x").release()


def test_the_default_names_recipe_and_time_and_never_collides(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "20250102-030405")
    names = [RunFolder.create(Config(), None, "some/dir/my recipe.yaml").path.name for _ in range(3)]
    assert names == ["my-recipe-20250102-030405", "my-recipe-20250102-030405-2", "my-recipe-20250102-030405-3"]


def test_the_config_names_the_folder_and_an_argument_wins(tmp_path):
    config = Config.model_validate({"output": {"folder": str(tmp_path / "configured")}})
    assert RunFolder.create(config, None, "x").path == tmp_path / "configured"
    assert RunFolder.create(config, tmp_path / "given", "x").path == tmp_path / "given"


def test_a_stage_cannot_lead_out_of_the_folder(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.evaluation_file("warm_start", "greedy") == tmp_path / "evaluations" / "warm_start-greedy.jsonl"
    assert folder.evaluation_file("../../etc/x", "greedy").parent == tmp_path / "evaluations"


def test_a_full_disk_later_is_one_clear_sentence(tmp_path, monkeypatch):
    folder = RunFolder.create(Config(), tmp_path / "run", "x")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TrainingError, match=r"summary\.json.*No space left.*output\.folder"):
        folder.write_summary({})
    with pytest.raises(TrainingError, match=r"base-greedy\.jsonl"):
        folder.write_records("base", "greedy", [{}])


def locks_on_files_alone(errno_of_folders, errno_of_files=0):
    """``fcntl.flock`` as on NFS: a folder has no lock, or (0) one on each machine, which keeps no other out."""
    real = fcntl.flock

    def flock(handle, how):
        folder = stat.S_ISDIR(os.fstat(handle).st_mode)
        if number := errno_of_folders if folder else errno_of_files:
            raise OSError(number, os.strerror(number))
        if not folder:
            assert how & fcntl.LOCK_SH or fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_RDWR, "NFS wants a handle for writing"
            real(handle, how)

    return flock


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOLCK, errno.EINVAL, 0])
def test_a_folder_on_nfs_is_locked_by_a_file_in_it(tmp_path, monkeypatch, caplog, number):
    monkeypatch.setattr(fcntl, "flock", locks_on_files_alone(number))
    first = RunFolder.create(Config(), tmp_path / "run", "x")
    assert first.is_in_use()
    with pytest.raises(ConfigError, match="another run is going on"):
        RunFolder(first.path).lock()
    with pytest.raises(ConfigError, match="another run is going on"):
        RunFolder.reopen(first.path)
    first.release()
    assert not first.is_in_use()
    again = RunFolder.reopen(first.path)
    assert again is not None
    assert again.is_in_use()
    again.release()
    assert not caplog.records


def test_a_folder_of_nothing_but_its_lock_is_unused(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", locks_on_files_alone(errno.EBADF))
    RunFolder(tmp_path).lock()
    assert os.listdir(tmp_path) == [".lock"]
    assert RunFolder.reopen(tmp_path) is None


def test_a_run_of_an_earlier_version_locks_the_folder_itself(tmp_path):
    folder = RunFolder(tmp_path)
    assert not folder.is_in_use()
    assert os.listdir(tmp_path) == [], "who looks makes no file"
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert folder.is_in_use()
    with pytest.raises(ConfigError, match="another run is going on"):
        folder.lock()
    os.close(handle)
    folder.lock()
    folder.release()


@pytest.mark.parametrize("number", [errno.ENOLCK, 0])
def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, caplog, number):
    monkeypatch.setattr(fcntl, "flock", locks_on_files_alone(number, errno.ENOLCK))
    folder = RunFolder.create(Config(), tmp_path / "run", "x")
    assert not folder.is_in_use()
    (said,) = caplog.messages
    assert "has no locks" in said
    assert "one at a time" in said


def test_leftovers_go_and_what_a_user_calls_partial_stays(tmp_path):
    ours = [
        ".final_model.partial",
        ".final_model.new.partial",
        "..final_model.new.partial.partial",
        "checkpoints/.step-12.partial",
    ]
    theirs = [".notes.partial", "notes.partial", ".data.part", "checkpoints/.mine.partial", ".summary.json.partial"]
    RunFolder.create(Config(), tmp_path, "x").release()
    for name in [*ours, *theirs]:
        (tmp_path / name).mkdir(parents=True)
    files = [".metrics.jsonl.ab_1cd2e.part", "evaluations/.end-greedy.jsonl.abcdefgh.part"]
    for name in [*files, ".thesis.txt.part", "evaluations/mine.part"]:
        (tmp_path / name).write_text("x")
    folder = RunFolder.reopen(tmp_path)
    assert folder is not None
    folder.release()
    assert not [name for name in [*ours, *files] if (tmp_path / name).exists()]
    assert not [name for name in [*theirs, ".thesis.txt.part", "evaluations/mine.part"] if not (tmp_path / name).exists()]


@pytest.mark.parametrize(
    ("back_to", "left"), [(50, "training: {seed: 3}"), (30, "training: {seed: 2}"), (None, "training: {seed: 1}")]
)
def test_a_run_that_goes_back_has_the_settings_of_the_steps_that_are_left(tmp_path, back_to, left):
    """Steps to 20 were made with the first settings, those to 40 with the second, and the later ones with the third."""
    folder = RunFolder.create(Config(), tmp_path / "run", "quickstart")
    folder.config.write_text("training: {seed: 3}")
    for step, seed in ((20, 1), (40, 2)):
        (folder.path / f"config-step-{step}.yaml").write_text(f"training: {{seed: {seed}}}")
    cut_back(folder, back_to)
    assert folder.config.read_text() == left
    kept = [step for step in (20, 40) if step <= (back_to or 0)]
    assert sorted(folder.path.glob("config-step-*")) == [folder.path / f"config-step-{step}.yaml" for step in kept]


def test_records_are_cut_back_line_by_line(tmp_path, monkeypatch):
    """They may be larger than memory."""
    folder = RunFolder.create(Config(), tmp_path / "run", "quickstart")
    folder.completions.write_text('{"step": 1}\n{"step": 2}\n{"step": 1')
    monkeypatch.setattr(Path, "read_bytes", None)
    cut_back(folder, 1)
    assert folder.completions.read_text() == '{"step": 1}\n'


def test_what_is_read_takes_little_memory(tmp_path):
    folder = RunFolder.create(Config(), tmp_path / "run", "quickstart")
    tokens, logprobs = list(range(10_000)), [-i / 1000 for i in range(10_000)]
    row = {"step": 1, "problem": "p", "completion": "said", "token_ids": tokens, "logprobs": logprobs}
    folder.completions.write_text(json.dumps(row) + "\n")
    for stage in ("base", "final"):
        folder.write_records(stage, "greedy", [{"question": "What is 1 + 1?", "prompt": "user: What is 1 + 1?", "strict": True}])
    run = read_run(folder.path)
    (record,) = run.completions
    assert (list(record.token_ids), list(record.logprobs)) == (tokens, logprobs)
    assert sys.getsizeof(record.token_ids) + sys.getsizeof(record.logprobs) < 125_000, "4 and 8 bytes a token"
    base, final = (evaluation.records[0] for evaluation in run.evaluations)
    assert base["question"] is final["question"]
    assert base["prompt"] is final["prompt"]


def test_a_kill_between_two_renames_loses_no_checkpoint(tmp_path):
    """Where one takes the place of another of its name, after settings that changed."""
    RunFolder.create(Config(), tmp_path, "x").release()
    kept = tmp_path / "checkpoints"
    for name in (".step-5.earlier.partial", ".step-5.partial", "step-6", ".step-6.earlier.partial"):
        (kept / name).mkdir(parents=True)
        (kept / name / "state.json").write_text(name)
    RunFolder.reopen(tmp_path).release()
    assert {p.name: (p / "state.json").read_text() for p in kept.iterdir()} == {
        "step-5": ".step-5.earlier.partial",
        "step-6": "step-6",
    }


TOKEN = "hf_" + "Ab1" * 10


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        (["x", "api_key=abc"], ["x", "api_key=<hidden>"]),
        (["--token", "abc"], ["--token", "<hidden>"]),
        (["--hub-token=abc"], ["--hub-token=<hidden>"]),
        (["rewards.functions.0.arguments.password=p"], ["rewards.functions.0.arguments.password=<hidden>"]),
        (["note=" + TOKEN], ["note=<hidden>"]),
        ([f"say {TOKEN} twice"], ["say <hidden> twice"]),
        (["https://me:pw@host/x?a=b"], ["https://<hidden>@host/x?a=b"]),
        (["data.max_prompt_tokens=100", "training.steps=3"], ["data.max_prompt_tokens=100", "training.steps=3"]),
        (["--dry-run", "tokenizer"], ["--dry-run", "tokenizer"]),
        (
            ["f=[{a: b, arguments: {api_key: abc, 'token': \"x y\"}}]"],
            ["f=[{a: b, arguments: {api_key: <hidden>, 'token': <hidden>}}]"],
        ),
        (["rewards.functions=[correctness, {function: a.py:f}]"], ["rewards.functions=[correctness, {function: a.py:f}]"]),
        (["data.source=https://h/x?api_key=abc&b=2#c"], ["data.source=https://h/x?api_key=<hidden>&b=2#c"]),
        (["x=Bearer abcdef1234"], ["x=Bearer <hidden>"]),
        (["f={headers: {Authorization: Token abcdef1234567890}}"], ["f={headers: {Authorization: <hidden>}}"]),
        (["f={password: correct horse battery, k: v}"], ["f={password: <hidden>, k: v}"]),
        (["e={command: python a.py --api-key abc123 --n 3}"], ["e={command: python a.py --api-key <hidden> --n 3}"]),
    ],
)
def test_a_command_keeps_no_secret(word, shown):
    assert hide_secrets_in_command(word) == shown


def test_a_reward_functions_key_is_in_no_file_of_the_folder(tmp_path):
    functions = [{"function": "correctness", "arguments": {"api_key": "topsecret", "nested": [{"token": "topsecret"}], "k": 2}}]
    config = Config.model_validate({"rewards": {"functions": functions}})
    folder = RunFolder.create(config, tmp_path, "x", command=["groupwise", "rewards.functions.0.arguments.api_key=topsecret"])
    assert all("topsecret" not in path.read_text() for path in folder.path.rglob("*") if path.is_file())
    assert yaml.safe_load(folder.config.read_text())["rewards"]["functions"][0]["arguments"]["k"] == 2


@pytest.mark.parametrize(
    "name", ["Authorization", "apiKey", "judgeApiKey", "openai_key", "API_KEYS", "hf_token_2", "password", "cookie", "pat", "GITLAB_PAT",
             "DATABASE_URL", "sessionid", "session_id", "AWS_ACCESS_KEY_ID", "otp",
             "db_pwd", "jwt", "sentryDsn", "key", "arguments.key"],
)  # fmt: skip
def test_a_name_of_a_secret_hides_whatever_it_holds(name):
    assert hide_secrets({name: "a", "b": {name: ["c", {"d": "e", "n": 1}]}}) == {
        name: "<hidden>",
        "b": {name: ["<hidden>", {"d": "<hidden>", "n": 1}]},
    }


def test_an_option_inside_a_command_hides_its_value():
    config = {"command": "python a.py --api-key abc123 --token=xyz --stop-token </s> --n 3", "parts": ["--api-key=abc"]}
    assert hide_secrets(config) == {
        "command": "python a.py --api-key <hidden> --token=<hidden> --stop-token </s> --n 3",
        "parts": ["--api-key=<hidden>"],
    }


def test_a_secret_of_digits_leaves_numbers_alone(monkeypatch):
    monkeypatch.setenv("PGPASSWORD", "00000000")
    assert json.loads(json_text({"a": 0.1 + 0.2, "b": "is 00000000", "n": 300000000})) == {
        "a": 0.1 + 0.2,
        "b": "is <hidden>",
        "n": 300000000,
    }


@pytest.mark.parametrize(
    "name",
    [
        "stop_token",
        "eos_token",
        "arguments.think_token",
        "answer_key",
        "tokenizer",
        "max_tokens",
        "keyword",
        "monkey",
        "author",
        "compass",
        "secretary",
        "pattern",
        "format",
    ],
)
def test_other_names_hide_nothing(name):
    assert hide_secrets({name: "abc"}) == {name: "abc"}


@pytest.mark.parametrize(
    "text",
    [
        "AIza" + "a1" * 16, "xoxb-1234567890-ab", "eyJhbGciOiJI.eyJzdWIi.sig-_1", "gsk_" + "a1" * 10, "sk_live_" + "a1" * 10,
        "npm_" + "a1" * 18, "ya29.a0-" + "a1" * 10, "ASIA" + "A1" * 8, "hvs." + "a1" * 10, "SG." + "a1" * 12, "whsec_" + "a1" * 10,
        "dop_v1_" + "a1" * 20, "shpat_" + "a1" * 10, "xapp-1-" + "A1" * 8,
    ],
)  # fmt: skip
def test_what_is_shaped_like_a_secret_is_hidden_anywhere(text):
    assert hide_secrets(["use " + text]) == ["use <hidden>"]
    assert "abc" not in hide_secrets("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\n")
    assert hide_secrets("POST https://hooks.slack.com/services/T0/B0/XX now") == "POST https://hooks.slack.com/<hidden> now"


@pytest.mark.parametrize("token", ["dXNlcjpwYXNzd29yZA==", "QWxhZGRpbjpvcGVu", "abcdef1234", "0af9b1c2d3e4f5a6", "a-b.c1~x/y"])
@pytest.mark.parametrize("scheme", ["Bearer", "basic"])
def test_what_stands_behind_a_scheme_is_hidden(scheme, token):
    assert hide_shaped_secrets(f"Authorization: {scheme} {token}, x") == f"Authorization: {scheme} <hidden>, x"


@pytest.mark.parametrize(
    "text",
    [
        "A basic manicure starts at $35", "a basic calculator", "Basic mathematics.", "basic self-defense", "a basic 2-bedroom flat",
        "the basic 12-month plan", "basic JavaScript", "bearer certificates", "a basic 1,000,000", "basic 10000000",
    ],
)  # fmt: skip
def test_words_behind_basic_stay(text):
    assert hide_secrets([text]) == [text]


ATTACKS = [
    "https://a.b/?" + "?key" * 50_000, "https://a.b/?" + "key" * 50_000 + "=", "https://a.b/?" + "key" * 50_000 + "=&",
    "https://" + "?a" * 100_000, "://" * 50_000, "://a" * 50_000 + "@", "https://hooks." * 15_000, "eyJhbGciOiJI-" * 15_000,
    "eyJhbGciOiJI." * 15_000, "eyJhbGciOiJI.eyJzdWIi" * 20_000, "-eyJ" * 50_000 + ".eyJzdWIi.", "bearer " * 30_000,
    "bearer" + " " * 200_000, "-----BEGIN " * 15_000, "-----BEGIN " + "PRIVATE KEY" * 20_000, "-----BEGIN RSA PRIVATE KEY-----" * 10_000,
    "-----BEGIN PRIVATE KEY-----" + "-----END " * 20_000, "hf_" * 50_000, "sk-" * 50_000, "xoxa-" * 30_000, "ya29." * 30_000,
    "api_key=" * 50_000, "api_" * 50_000, "a." * 100_000 + "key", "key" + "1" * 200_000, "token" + " " * 200_000, 'token="' * 30_000,
]  # fmt: skip
"""Where a pattern goes over the same text again and again, each takes minutes to days; in proportion to the text, a moment."""


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", ATTACKS, ids=[text[:12] + "..." + text[-8:] for text in ATTACKS])
def test_secrets_are_looked_for_in_time_proportional_to_the_text(text):
    hide_shaped_secrets(text)
    hide_secrets({text: text})
    hide_secrets_in_command([text, f"--x={text}"])


PLAIN = [
    (re.compile(r"\beyJ[\w-]{8,}\.eyJ[\w-]{4,}\.[\w-]+"), HIDDEN),
    (re.compile(r"(?<=://)[^/\s@]+@"), f"{HIDDEN}@"),
    (
        re.compile(r"([?&][^?=&#\s]*(?:key|token|secret|passw|signature|\bsig\b|auth|credential)[^?=&#\s]*=)[^&#\s\"'\]},]+"),
        rf"\1{HIDDEN}",
    ),
]
"""What is meant, as patterns that say no more than that, and take their time."""


PIECES = "eyJ,eyJabcde,eyJhbGciOiJI,.,-,?,&,=,#,key,token,sig,x-,a,b12,/,://,@,',],\",é, "


def test_the_quick_patterns_hide_what_the_plain_ones_hide():
    pieces = [*PIECES.split(","), ","]
    rng = random.Random(0)
    found = 0
    for _ in range(20_000):
        text = "://" + "".join(rng.choices(pieces, k=rng.randint(3, 14)))
        plain = text
        for pattern, shown in PLAIN:
            plain = pattern.sub(shown, plain)
        assert hide_shaped_secrets(text) == plain
        found += plain != text
    assert found > 2000


def test_the_working_directory_is_no_secret_though_its_variable_is_called_pwd(tmp_path, monkeypatch):
    monkeypatch.setenv("PWD", "/home/a1/project")
    monkeypatch.setenv("DB_PWD", "tr0ub4dor")
    assert hide_secrets({"a": "/home/a1/project/runs tr0ub4dor"}) == {"a": "/home/a1/project/runs <hidden>"}


def test_numbers_are_no_secrets():
    assert hide_secrets({"token": 3, "a": ("x", 1.0)}) == {"token": 3, "a": ["x", 1.0]}


def test_the_revision_is_that_of_the_checkout_that_tracks_the_package(tmp_path):
    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    git("commit", "-qm", "someone else's project", "--allow-empty")
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert code_revision(package) is None  # lies in a repository, but is not part of it
    git("add", ".")
    git("commit", "-qm", "one")
    head = git("rev-parse", "HEAD").strip()
    assert code_revision(package) == {"revision": head, "dirty": False}
    (package / "new.py").write_text("x = 1")
    assert code_revision(package) == {"revision": head, "dirty": True}
