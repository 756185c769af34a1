"""What core may reach for, read from its source: declared packages, no environment, nothing unpickled.

The checks parse every module of core and run none. Each check is also shown source that breaks the rule, so that a
check which has gone blind fails here.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.project import CORE, ROOT, module_of, modules_of_core, pyproject, walked

# Import packages that core may use, beside the standard library and itself: its dependencies of pyproject.toml. No
# tensor framework and no vendor's package is among them. A room that has an extra of its own adds a line to ROOMS.
DEPENDENCIES = frozenset({"numpy", "pluggy", "tokenizers", "jinja2", "rich", "click", "ahocorasick_rs"})
ROOMS: dict[str, frozenset[str]] = {
    "polydraft/instruments/trace_view.py": frozenset({"matplotlib"}),  # imported only to draw a PNG
    "polydraft/conformance/vendor.py": frozenset({"pytest"}),  # the base of a test class
    "polydraft/sampling/automaton.py": frozenset({"llguidance"}),  # the extra `grammar`; imported where a grammar is asked for
    "polydraft/sampling/grammar_process.py": frozenset({"llguidance"}),  # likewise
    "polydraft/serving": frozenset({"starlette", "uvicorn", "h11", "msgspec", "zmq", "prometheus_client"}),  # the extra `serve`
    "polydraft/ray": frozenset({"ray", "starlette", "msgspec"}),  # the extra `ray`, which brings `serve`
    "polydraft/template": frozenset({"polydraft_mychip"}),  # a package to be: it imports itself
}

ENVIRONMENT = CORE / "polydraft" / "environment.py"
ENVIRONMENT_NAMES = frozenset({"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv", "expandvars"})
ENVIRONMENT_OPTIONS = frozenset({"envvar", "auto_envvar_prefix"})  # click reads variables named by these
UNPICKLERS = frozenset({"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"})


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every absolute import, also of those by literal name through `import_module`."""
    for node in walked(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def foreign_imports(tree: ast.AST, path: Path) -> list[str]:
    """Return the imports of packages that are neither standard library, polydraft, nor declared for this file."""
    extra = frozenset[str]().union(*(packages for room, packages in ROOMS.items() if (CORE / room) in (path, *path.parents)))
    allowed = sys.stdlib_module_names | DEPENDENCIES | extra | {"polydraft"}
    return [f"{line}: {name}" for line, name in imported(tree) if name.partition(".")[0] not in allowed]


def environment_reads(tree: ast.AST, path: Path) -> list[str]:
    """Return the places that read the process environment, directly or by an option of click."""
    if path == ENVIRONMENT:
        return []
    found = []
    for node in walked(tree):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT_NAMES:
            found.append(f"{node.lineno}: {node.attr}")
        elif isinstance(node, ast.ImportFrom) and node.module in {"os", "os.path", "posixpath"}:
            found += [f"{node.lineno}: {alias.name}" for alias in node.names if alias.name in ENVIRONMENT_NAMES]
        elif isinstance(node, ast.keyword) and node.arg in ENVIRONMENT_OPTIONS:
            found.append(f"{node.lineno}: {node.arg}=")
    return found


def unpickling(tree: ast.AST, path: Path) -> list[str]:
    """Return the places that could execute code from a data file."""
    del path
    found = [f"{line}: {name}" for line, name in imported(tree) if name.partition(".")[0] in UNPICKLERS]
    for node in walked(tree):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                found.append(f"{node.lineno}: allow_pickle=")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "eval":
            found.append(f"{node.lineno}: eval()")
    return found


def json_parsing(tree: ast.AST, path: Path) -> list[str]:
    """Return the places that parse JSON past `polydraft.json_text`, which refuses what nests without end."""
    if path == CORE / "polydraft" / "json_text.py":
        return []
    names = {"load", "loads", "JSONDecoder"}
    found = []
    for node in walked(tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr in names
            and isinstance(node.value, ast.Name)
            and node.value.id == "json"
        ):
            found.append(f"{node.lineno}: {node.attr}")
        elif isinstance(node, ast.ImportFrom) and node.module == "json":
            found += [f"{node.lineno}: {alias.name}" for alias in node.names if alias.name in names]
    return found


Check = Callable[[ast.AST, Path], list[str]]
CHECKS: list[Check] = [foreign_imports, environment_reads, unpickling, json_parsing]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_core_has_none(check: Check):
    trees = modules_of_core()
    assert trees, f"no modules below {CORE}"
    found = {str(path.relative_to(ROOT)): places for path, tree in trees.items() if (places := check(tree, path))}
    assert not found


@pytest.mark.parametrize(
    ("check", "source"),
    [
        (foreign_imports, "import torch"),
        (foreign_imports, "import paddle.nn.functional as F"),
        (foreign_imports, "def f():\n    from cuda.core import Device"),
        (foreign_imports, "import importlib\nm = importlib.import_module('polydraft_cuda.device')"),
        (foreign_imports, "m = __import__('cupy')"),
        (foreign_imports, "if TYPE_CHECKING:\n    import transformers"),
        (environment_reads, "import os\nx = os.environ['HOME']"),
        (environment_reads, "import os\nx = os.getenv('HOME')"),
        (environment_reads, "from os import environ as e"),
        (environment_reads, "import os\nx = os.path.expandvars('$HOME')"),
        (environment_reads, "@click.option('--model', envvar='POLYDRAFT_MODEL')\ndef f(model): ..."),
        (environment_reads, "main(auto_envvar_prefix='POLYDRAFT')"),
        (unpickling, "import pickle"),
        (unpickling, "from joblib import load"),
        (unpickling, "x = np.load(path, allow_pickle=True)"),
        (unpickling, "x = np.load(path, allow_pickle=flag)"),
        (unpickling, "x = eval(text)"),
        (json_parsing, "import json\nx = json.loads(text)"),
        (json_parsing, "import json\nx = json.load(file)"),
        (json_parsing, "from json import loads as parse"),
    ],
)
def test_check_sees(check: Check, source: str):
    assert check(ast.parse(source), CORE / "polydraft" / "planted.py")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check_lets_pass(check: Check):
    source = "import os\nimport numpy as np\nfrom polydraft.errors import ConfigError\nfrom . import sibling\n"
    source += "x = np.load(path, allow_pickle=False)\ny = os.path.join('a', 'b')\nmodel.eval()\nimport json\njson.dumps(x)\n"
    assert not check(ast.parse(source), CORE / "polydraft" / "planted.py")


def test_the_allowed_packages_are_the_declared_ones():
    declared = {re.split(r"[^\w-]", line)[0] for line in pyproject()["project"]["dependencies"]}
    assert {module_of(package) for package in declared} == DEPENDENCIES
