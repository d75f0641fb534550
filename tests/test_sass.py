# SPDX-License-Identifier: MIT
"""The instructions of a build can be looked at where the CUDA toolkit has a disassembler."""

import pytest
import sass


def test_what_was_asked_for_is_disassembled(tmp_path, monkeypatch, capfd):
    tool = tmp_path / "nvdisasm"
    tool.write_text('#!/bin/sh\necho "$1" "${2##*/}" $(head -c 4 "$2" | tail -c 3)\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert sass.main(["combine", "element=float16", "sm_90a"]) == 0
    assert capfd.readouterr().out.splitlines() == [
        "// combine sm_90a element=float16 general=0: the first of 1",
        "-c combine.cubin ELF",
    ]


def test_what_is_missing_is_named(monkeypatch, capsys):
    monkeypatch.setattr(sass, "disassembler", lambda: None)
    assert sass.main(["combine"]) == 1
    assert "pip install 'cuda-toolkit[nvdisasm]'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        sass.main(["combine", "element=int8"])
    assert "no specialisation of combine has element=int8" in capsys.readouterr().err
