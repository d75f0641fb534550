# SPDX-License-Identifier: MIT
"""What docstrings and pages say about the code is so."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Of the modules without an underscore, demo is a command and nobody's library.
MODULES = [
    "cupyflash",
    *(
        f"cupyflash.{module.name}"
        for module in pkgutil.iter_modules([str(ROOT / "cupyflash")])
        if not module.name.startswith("_") and module.name != "demo"
    ),
]
SECTION = re.compile(r"^(\w[\w ]*)\n-{3,}\n", re.M)


def public(module):
    """(name, object) of the public functions and classes of a module and the methods of these."""
    listed = getattr(module, "__all__", None)
    for name, value in vars(module).items():
        if listed is None:
            if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
                continue
        elif name not in listed:
            continue
        if inspect.isroutine(value):
            yield name, value
        elif inspect.isclass(value):
            yield name, value
            for method, function in vars(value).items():
                function = inspect.unwrap(getattr(function, "__func__", function))
                if inspect.isfunction(function) and not method.startswith("_"):
                    yield f"{name}.{method}", function


def sections(thing) -> dict[str, str]:
    """The numpydoc sections of a docstring, by title; what stands before them by ''."""
    title, *parts = SECTION.split(inspect.getdoc(thing) or "")
    return {"": title} | dict(zip(parts[::2], parts[1::2], strict=True))


def documented(thing) -> list[str]:
    """The parameters that a docstring describes; fields of a class may be attributes."""
    found = sections(thing)
    text = found.get("Parameters", "")
    if inspect.isclass(thing):
        text += found.get("Attributes", "")
    heads = re.findall(r"^(?! )(.+)$", text, re.M)
    return [name for head in heads for name in head.split(" : ")[0].split(", ")]


def declared(thing) -> list[str]:
    """The parameters that a function or class takes, as numpydoc spells them."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = inspect.signature(thing).parameters.values()
    return [stars.get(p.kind, "") + p.name for p in parameters if p.name not in ("self", "cls")]


THINGS = {
    f"{name}.{thing}": value
    for name in MODULES
    for thing, value in public(importlib.import_module(name))
}


@pytest.mark.parametrize("name", THINGS)
def test_docstrings_name_the_parameters_that_there_are(name):
    thing = THINGS[name]
    assert sections(thing)[""].strip(), "no docstring"
    assert sorted(documented(thing)) == sorted(declared(thing))


@pytest.mark.parametrize("name", THINGS)
def test_docstrings_have_an_example(name):
    assert ">>> " in sections(THINGS[name]).get("Examples", "")


@pytest.mark.parametrize("name", [name for name in THINGS if not inspect.isclass(THINGS[name])])
def test_docstrings_say_what_is_returned(name):
    thing = THINGS[name]
    if inspect.signature(thing).return_annotation not in ("None", None, inspect.Signature.empty):
        assert {"Returns", "Yields"} & sections(thing).keys()


def test_modules_list_only_what_they_have():
    for name in MODULES:
        module = importlib.import_module(name)
        for listed in getattr(module, "__all__", ()):
            assert hasattr(module, listed), f"{name}.{listed}"


README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
WITHOUT_GPU = [text for text in EXAMPLES if "cupy as" not in text and "device=0" not in text]


@pytest.mark.parametrize("text", WITHOUT_GPU, ids=range(len(WITHOUT_GPU)))
def test_examples_of_the_readme_run(text):
    exec(compile(text, "README.md", "exec"), {})


@pytest.mark.gpu
def test_examples_of_the_readme_run_on_a_gpu(cupy):
    examples = [text for text in EXAMPLES if text not in WITHOUT_GPU]
    assert len(examples) == 2
    for text in examples:
        exec(compile(text, "README.md", "exec"), {})


def test_the_readme_leads_to_files_that_there_are():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
    for target in re.findall(r"`((?:kernels|docs|tests|cupyflash)/[\w./]+)`", README):
        assert (ROOT / target).exists(), target
