"""Plans of training commands in files: shell scripts that hold the command, and config files."""

from __future__ import annotations

import contextlib
import io
import json
from typing import TYPE_CHECKING, Any

import pytest

import trimtab
from test_script_plan import FULL, Script, make_plan
from trimtab.cli.main import main_code
from trimtab.errors import BrokenFile, WrongUse
from trimtab.scripts.shell_edit import rewrite_command
from trimtab.scripts.shell_words import ShellScript
from trimtab.spec import ScriptChange

if TYPE_CHECKING:
    from pathlib import Path

    from trimtab.spec import Plan

ORIGINAL = "python train.py --batch-size 64 --grad-accum 1"


def change(name: str, value: str, **fields: Any) -> ScriptChange:
    return ScriptChange(names=(name,), value=value, text=f"{name} {value}", kind="integer", **fields)


CHANGES = (change("--batch-size", "16"), change("--grad-accum", "4"))


def rewrite(text: str, changes: tuple[ScriptChange, ...] = CHANGES, **options: Any) -> str:
    return rewrite_command(text, "run.sh", ORIGINAL, changes, **options).text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("python train.py --batch-size 64\n", "python train.py --batch-size 16 --grad-accum 4\n"),
        # What is typed in the file counts, not what the plan was made for.
        ("python train.py -x --batch-size=8 ; ls", "python train.py -x --batch-size=16 --grad-accum 4 ; ls"),
        (
            "python train.py \\\n --batch-size '64' \\\n -o \"$D/a b\" \\\n > log 2>&1\n",
            "python train.py \\\n --batch-size '16' \\\n -o \"$D/a b\" \\\n --grad-accum 4 \\\n > log 2>&1\n",
        ),
        (
            "# --batch-size 1\nBS=64  # all\npython train.py --batch-size $BS # -b 2\n",
            "# --batch-size 1\nBS=16  # all\npython train.py --batch-size $BS --grad-accum 4 # -b 2\n",
        ),
        (
            'python train.py --batch-size="${BS:-64}" "$@"',
            'python train.py --batch-size="${BS:-16}" --grad-accum 4 "$@"',
        ),
        (
            'ARGS=(\n  --lr 1 # rate\n  --batch-size 64\n)\npython train.py "${ARGS[@]}"\n',
            'ARGS=(\n  --lr 1 # rate\n  --batch-size 16\n)\npython train.py "${ARGS[@]}" --grad-accum 4\n',
        ),
        (
            'OPTS="--lr 1 --batch-size 64 --grad-accum $N"\nN=1\npython train.py $OPTS',
            'OPTS="--lr 1 --batch-size 16 --grad-accum $N"\nN=4\npython train.py $OPTS',
        ),
        (
            "cat <<EOF\npython train.py\nEOF\nif a; then python train.py --grad-accum 9; fi",
            "cat <<EOF\npython train.py\nEOF\nif a; then python train.py --grad-accum 4 --batch-size 16; fi",
        ),
        # The last of two counts; the other would only mislead.
        (
            "python train.py --batch-size 1 --lr 2 --batch-size 64\r\n",
            "python train.py --lr 2 --batch-size 16 --grad-accum 4\r\n",
        ),
    ],
)
def test_only_the_options_of_the_command_change(before: str, after: str) -> None:
    assert rewrite(before) == after
    assert rewrite(after) == after


def test_switches_variables_and_options_of_the_launcher_change() -> None:
    text = "export BATCH=64\nA=1 torchrun --nproc-per-node=8 train.py --fp32 \\\n  --lr 1\n"
    changes = (
        ScriptChange(names=("--fp32",), value="false", text="without --fp32", kind="switch"),
        ScriptChange(names=("--bf16",), value="true", text="--bf16 added", kind="switch"),
        change("BATCH", "16", form="variable"),
        change("A", "2", form="variable"),
        change("C", "3", form="variable"),
        change("--nproc-per-node", "4", is_launcher=True),
        change("--nnodes", "2", is_launcher=True),
    )
    assert rewrite(text, changes) == (
        "export BATCH=16\nC=3 A=2 torchrun --nnodes 2 --nproc-per-node=4 train.py \\\n  --lr 1 \\\n  --bf16\n"
    )


def test_computed_words_are_kept_in_a_comment_or_refused() -> None:
    text = "  python train.py --batch-size $(cat size)\n"
    with pytest.raises(WrongUse, match="the shell computes it, and the plan needs 16"):
        rewrite(text)
    assert rewrite(text, beside=True) == (
        "  # was: $(cat size)\n  python train.py --batch-size 16 --grad-accum 4\n"
    )


def test_which_command_is_meant_must_be_clear() -> None:
    text = "python train.py --lr 3\npython train.py --lr 2\npython other.py\n"
    with pytest.raises(WrongUse, match=r"train.py is started in lines 1 and 2"):
        rewrite(text)
    assert rewrite(text, line=2).splitlines()[1] == "python train.py --lr 2 --batch-size 16 --grad-accum 4"
    with pytest.raises(WrongUse, match=r"no command there starts train.py; it has line 1: python train.py"):
        rewrite(text, line=3)
    with pytest.raises(WrongUse, match=r"no command there starts train.py"):
        rewrite("echo python train.py\n")
    with pytest.raises(BrokenFile, match="never closed"):
        rewrite("python train.py 'a\n")


def test_a_variable_with_several_uses_is_told() -> None:
    rewritten = rewrite_command(
        "BS=64\npython train.py --batch-size $BS --out run-$BS\n", "run.sh", ORIGINAL, CHANGES[:1]
    )
    assert rewritten.text == "BS=16\npython train.py --batch-size $BS --out run-$BS\n"
    assert rewritten.notes == ["BS is used in lines 2: all of them get 16"]
    edit = rewritten.edits[0]
    assert (edit.name, edit.before, edit.after, edit.line) == (
        "--batch-size",
        "--batch-size 64",
        "--batch-size 16",
        2,
    )


def test_words_have_the_values_of_plain_variables() -> None:
    script = ShellScript('A=b\nC="x y"\necho $A "$C" $C ${D:-e} $(f) \'$A\'', "run.sh")
    words = script.resolve(script.commands[-1].words)
    assert [word.text for word in words] == ["echo", "b", "x y", "x", "y", "e", "$(f)", "$A"]
    assert [word.is_known for word in words].count(False) == 1


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(FULL, encoding="utf-8")
    plan = make_plan(Script(FULL), "python train.py --batch-size 2 --grad-accum 256")
    (tmp_path / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    return plan


def run(*words: str) -> tuple[int, str]:
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["trimtab", *words])
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            return main_code(), output.getvalue()


@pytest.mark.usefixtures("planned")
def test_apply_writes_a_script_and_revert_puts_it_back(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    text = "#!/bin/sh\npython train.py --batch-size 2 --grad-accum 256\n"
    script.write_text(text, encoding="utf-8")
    code, output = run("apply", "plan.json", "run.sh")
    assert (code, script.read_text(encoding="utf-8")) == (0, text)
    assert "+python train.py --batch-size 64 --grad-accum 8 --precision bf16 --compile" in output
    code, output = run("apply", "plan.json", "run.sh", "--yes", "--json")
    assert code == 0
    assert [edit["key"] for edit in json.loads(output)["edits"]] == [
        "--batch-size",
        "--grad-accum",
        "--precision",
        "--compile",
    ]
    assert "--batch-size 64" in script.read_text(encoding="utf-8")
    assert "already" in run("apply", "plan.json", "run.sh")[1]
    trimtab.revert("run.sh")
    assert script.read_text(encoding="utf-8") == text
    script.chmod(0o444)
    code, output = run("apply", "plan.json", "run.sh", "--yes")
    assert (code, "read-only" in output) == (5, True)


@pytest.mark.usefixtures("planned")
def test_apply_says_what_to_type_where_no_file_holds_the_command(tmp_path: Path) -> None:
    code, output = run("apply", "plan.json")
    assert code == 0
    assert "   python train.py --batch-size 64 --grad-accum 8 --precision bf16 --compile" in output
    assert "trimtab apply PLAN FILE.sh" in " ".join(output.split())
    (tmp_path / "other.yaml").write_text("a: 1\n", encoding="utf-8")
    for file, said in (
        ("nowhere.sh", "there is no such file"),
        ("nowhere.yaml", "there is no such file"),
        ("other.yaml", "it changes the command line only"),
        ("run.sh:top", "is no line of a shell script"),
    ):
        (tmp_path / "run.sh").write_text("python train.py\n", encoding="utf-8")
        code, output = run("apply", "plan.json", file)
        assert (code, said in " ".join(output.split())) == (2, True), output


def test_the_gpus_of_a_batch_script_follow_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(FULL, encoding="utf-8")
    plan = make_plan(
        Script(FULL), "torchrun --nproc-per-node 8 train.py --batch-size 2 --grad-accum 16", on="4xH100"
    )
    (tmp_path / "run.sbatch").write_text(
        "#!/bin/bash\n#SBATCH --gres=gpu:8\n#SBATCH --time=1:00\nsrun torchrun --nproc-per-node=8 train.py\n",
        encoding="utf-8",
    )
    trimtab.apply(plan, "run.sbatch")
    lines = (tmp_path / "run.sbatch").read_text(encoding="utf-8").splitlines()
    assert lines[1:3] == ["#SBATCH --gres=gpu:4", "#SBATCH --time=1:00"]
    assert lines[3].startswith("srun torchrun --nproc-per-node=4 train.py --batch-size ")


@pytest.mark.usefixtures("planned")
def test_other_commands_say_that_a_file_is_a_plan() -> None:
    for words, said in (
        (["show", "plan.json"], "it is a plan, and no config"),
        (["doctor", "plan.json"], "trimtab doctor LOG --plan plan.json"),
    ):
        code, output = run(*words)
        assert (code, said in " ".join(output.split())) == (2, True), output
    code, output = run("report", "plan.json", "-o", "page.html")
    assert code == 0
    assert "trimtab plan --on '1xH100 SXM5 80GB' -- python train.py --batch-size 2" in " ".join(
        output.split()
    )
