"""What is installed: no library too many, typed, one version, and no quiet mix with another distribution."""

import importlib.metadata
import re
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import zenflow
import zenflow._core

PACKAGE = Path(zenflow.__file__).parent
ROOT = Path(__file__).parents[1]

# --- the binary --------------------------------------------------------------------------------------


def needed_libraries(elf: Path) -> set[str]:
    """Return the ``DT_NEEDED`` names of a little-endian ELF64 file, from its dynamic segment."""
    data = elf.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01", f"{elf} is not a little-endian ELF64 file"
    (table,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    segments = [struct.unpack_from("<IIQQQQQQ", data, table + size * i) for i in range(count)]
    offset, length = next((s[2], s[5]) for s in segments if s[0] == 2)  # PT_DYNAMIC
    entries = [struct.unpack_from("<qQ", data, at) for at in range(offset, offset + length, 16)]
    address = next(value for tag, value in entries if tag == 5)  # DT_STRTAB, an address in memory
    strings = next(s[2] + address - s[3] for s in segments if s[0] == 1 and s[3] <= address < s[3] + s[6])
    names = [strings + value for tag, value in entries if tag == 1]  # DT_NEEDED
    return {data[at : data.index(b"\0", at)].decode() for at in names}


@pytest.mark.skipif(sys.platform != "linux", reason="reads an ELF file")
def test_extension_links_only_the_c_runtime() -> None:
    """Neither libtorch, CUDA, a BLAS nor libpython: one binary serves every torch build."""
    c_runtime = re.compile(r"lib(c|m|dl|rt|pthread|util|gcc_s)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+")
    libraries = needed_libraries(Path(zenflow._core.__file__))
    assert "libc.so.6" in libraries
    assert {name for name in libraries if not c_runtime.fullmatch(name)} == set()


@pytest.mark.skipif(sys.platform != "linux", reason="reads an ELF file")
def test_the_reader_sees_libtorch_where_it_is_linked() -> None:
    """The oracle of the test above: torch's own extension does link libtorch."""
    torch_extension = Path(pytest.importorskip("torch._C").__file__)
    assert any(name.startswith("libtorch") for name in needed_libraries(torch_extension))


# --- the package -------------------------------------------------------------------------------------


def test_extension_is_built_for_the_stable_abi() -> None:
    assert ".abi3." in Path(zenflow._core.__file__).name


@pytest.mark.parametrize("name", ["py.typed", "_core.pyi"])
def test_type_information_is_installed(name: str) -> None:
    assert (PACKAGE / name).is_file()


def test_versions_agree() -> None:
    """Cargo's workspace, the installed metadata, the extension and the package name one version."""
    workspace = re.search(r'\[workspace\.package\]\nversion = "([^"]+)"', (ROOT / "Cargo.toml").read_text())
    assert workspace is not None
    version = workspace[1]
    assert importlib.metadata.version("torch-zenflow") == version
    assert zenflow._core.__version__ == version
    assert zenflow.__version__ == version


def test_every_crate_takes_the_workspace_version() -> None:
    manifests = sorted(ROOT.glob("rust/*/Cargo.toml"))
    assert len(manifests) >= 2
    for manifest in manifests:
        assert "\nversion.workspace = true\n" in manifest.read_text(), manifest
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()


def test_changelog_knows_this_version() -> None:
    assert f"\n## [{zenflow.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


# --- the unrelated distribution `zenflow` ------------------------------------------------------------


def make_wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> Path:
    """Write a pure wheel of ``files`` (path in site-packages to text) that pip installs and uninstalls."""
    dist_info = f"{name.replace('-', '_')}-{version}.dist-info"
    files = {
        **files,
        f"{dist_info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{dist_info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{dist_info}/RECORD"])
    wheel = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in {**files, f"{dist_info}/RECORD": record}.items():
            archive.writestr(path, text)
    return wheel


class Environment:
    """A virtual environment without torch, and the two wheels that fight over ``zenflow/__init__.py``."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        self.python = folder / "venv" / "bin" / "python"
        # This package reduced to what the check is about: the real check, the real first lines of __init__.
        self.ours = make_wheel(
            folder,
            "torch-zenflow",
            "0.1.0",
            {
                "zenflow/__init__.py": "from zenflow._identity import check_identity\n\ncheck_identity()\n",
                "zenflow/_identity.py": (PACKAGE / "_identity.py").read_text(),
                "zenflow/entry.py": "from zenflow._identity import check_identity\n\ncheck_identity()\n",
            },
        )
        self.other = make_wheel(
            folder,
            "zenflow",
            "0.2.2",
            {"zenflow/__init__.py": "from .flow import Flow\n", "zenflow/flow.py": "Flow = object\n"},
        )

    def pip(self, *arguments: str | Path) -> None:
        command = [sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check"]
        subprocess.run([*command, *arguments], check=True, capture_output=True)

    def install(self, wheel: Path) -> None:
        self.pip("install", "--no-index", "--no-deps", "--force-reinstall", wheel)

    def run(self, code: str) -> str:
        """Return the last line that ``code`` leaves on stderr in this environment; empty if it ran."""
        command = [self.python, "-I", "-c", code]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        return "" if result.returncode == 0 else result.stderr.strip().splitlines()[-1]


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    pytest.importorskip("pip", reason="installs wheels with pip")
    return Environment(tmp_path)


REMEDY = "pip uninstall zenflow && pip install --force-reinstall --no-deps torch-zenflow"


def test_alone_it_imports(environment: Environment) -> None:
    environment.install(environment.ours)
    assert environment.run("import zenflow, zenflow.entry") == ""


def test_the_other_distribution_under_ours_is_named(environment: Environment) -> None:
    environment.install(environment.other)
    environment.install(environment.ours)
    error = environment.run("import zenflow")
    assert error.startswith("ImportError: torch-zenflow and the unrelated distribution zenflow 0.2.2")
    assert REMEDY in error


def test_the_other_distribution_over_ours_is_named_by_our_modules(environment: Environment) -> None:
    environment.install(environment.ours)
    environment.install(environment.other)
    assert environment.run("import zenflow") == ""  # its __init__, not ours: nothing of ours runs
    error = environment.run("import zenflow.entry")
    assert error.startswith("ImportError: torch-zenflow and the unrelated distribution zenflow 0.2.2")
    assert REMEDY in error


def test_what_its_removal_leaves_is_named_by_our_modules(environment: Environment) -> None:
    environment.install(environment.ours)
    environment.install(environment.other)
    environment.pip("uninstall", "--yes", "zenflow")
    error = environment.run("import zenflow.entry")
    assert error.startswith("ImportError: ")
    assert "its __init__.py is missing" in error
    environment.install(environment.ours)  # the remedy
    assert environment.run("import zenflow, zenflow.entry") == ""


def test_the_other_distribution_elsewhere_is_no_concern(environment: Environment, tmp_path: Path) -> None:
    environment.install(environment.ours)
    with zipfile.ZipFile(environment.other) as archive:
        archive.extractall(tmp_path / "elsewhere")
    append = f"import sys; sys.path.append({str(tmp_path / 'elsewhere')!r}); "
    assert environment.run(append + "import zenflow, zenflow.entry") == ""


@pytest.mark.parametrize("module", ["__init__.py", "cli/__init__.py"])
def test_every_entrance_checks_first(module: str) -> None:
    """The package and its command call the check before they import anything else of this package."""
    imports_and_calls = [
        line
        for line in (PACKAGE / module).read_text().splitlines()
        if line.startswith(("from ", "import ", "check_"))
    ]
    assert imports_and_calls[:2] == ["from zenflow._identity import check_identity", "check_identity()"]
