"""Options, errors and the version check: what needs no model."""

from __future__ import annotations

import pickle

import pytest
from spice_moe import SpiceOptions, SpiceVersionError, _versions, errors
from spice_moe.plan import format_bytes


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"enabled": 1}, TypeError),
        ({"repack": "yes"}, TypeError),
        ({"io_threads": 0}, ValueError),
        ({"io_threads": 65}, ValueError),
        ({"io_threads": 2.0}, TypeError),
        ({"io_threads": True}, TypeError),
        ({"progress": 3}, TypeError),
    ],
)
def test_options_that_make_no_sense_are_named(options: dict, error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        SpiceOptions(**options)


def test_unknown_and_positional_options_are_refused() -> None:
    with pytest.raises(TypeError):
        SpiceOptions(budget=3)
    with pytest.raises(TypeError):
        SpiceOptions(True)


def test_overrides_replace_only_what_is_given() -> None:
    options = SpiceOptions(io_threads=2, repack=True)
    assert options.with_overrides(repack=False, progress=None) == SpiceOptions(io_threads=2)
    assert options.with_overrides() == options


def test_every_code_has_its_exception() -> None:
    classes = [type(errors.from_code(code, "text")) for code in range(1, 10)]
    assert classes == [
        errors.SpiceFileNotFoundError,
        errors.SpiceFormatError,
        errors.SpiceFormatError,
        errors.SpiceFormatError,
        errors.SpiceUnsupportedError,
        errors.SpiceIOError,
        errors.SpiceMemoryError,
        errors.SpiceVersionError,
        errors.SpiceError,
    ]
    assert type(errors.from_code(99, "text")) is errors.SpiceError
    for kind in set(classes):
        error = kind("a text")
        assert str(error) == "a text"
        assert isinstance(error, errors.SpiceError)
        assert type(pickle.loads(pickle.dumps(error))) is kind


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.SpiceVersionError, ImportError),
        (errors.SpiceFormatError, ValueError),
        (errors.SpiceUnsupportedError, ValueError),
        (errors.SpiceIOError, OSError),
        (errors.SpiceMemoryError, MemoryError),
        (errors.SpiceFileNotFoundError, FileNotFoundError),
        (errors.SpiceFileNotFoundError, ValueError),
    ],
)
def test_errors_are_the_built_in_ones_too(kind: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(kind, builtin)


def test_another_llama_cpp_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import llama_cpp

    _versions.check_versions()
    monkeypatch.setattr(llama_cpp, "__version__", "0.3.35")
    with pytest.raises(SpiceVersionError, match=r"found 0\.3\.35.*pip install llama-cpp-python==\d"):
        _versions.check_versions()


def test_another_ggml_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from spice_moe import _core

    monkeypatch.setattr(_core, "runtime_ggml_version", lambda: "0.0.1")
    with pytest.raises(SpiceVersionError, match=r"ggml 0\.0\.1 is loaded.*pip install"):
        _versions.check_versions()


def test_byte_counts_in_words() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 << 20, 5 << 30, 7 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 MiB",
        "5.0 GiB",
        "7.0 TiB",
    ]
