"""How a program reaches the actors of a cluster: by the name of its module, or by the path of its file.

Nothing of the program is sent. An actor imports it, and what cannot be imported is refused with the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.lang.program import Program

FILE_MODULE = "plait_program"
"""The name of the module that an actor makes from the file of a program."""

_is_importing = False


class ProgramReference(msgspec.Struct, frozen=True):
    """Where an actor finds a program: `qualname` in a module, or in the file at a path."""

    qualname: str
    module: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        return f"{self.file or self.module}:{self.qualname}"


def reference_of(
    program: Program[Any], working_dir: Path | None, target: tuple[Path, str] | None = None
) -> ProgramReference:
    """Returns the reference of a program. Raises InputError, with the reason, if an actor could not import it.

    working_dir: the folder that is copied to the actors; the path of a file is then relative to it.
    target: the file that the program was loaded from, if it was not imported, and its name there.
    """
    if target is not None:
        file, qualname = target
    else:
        module_name, qualname = _find(program)
        main_file = _main_module_or_file(program) if module_name == "__main__" else module_name
        if isinstance(main_file, str):
            return ProgramReference(qualname, module=main_file)
        file = main_file
    path = file.resolve()
    if working_dir is None:
        return ProgramReference(qualname, file=str(path))
    if not path.is_relative_to(working_dir):
        raise _cannot_travel(program, f"is in {path}, which is not in the working_dir {working_dir}")
    return ProgramReference(qualname, file=str(path.relative_to(working_dir)))


def _find(program: Program[Any]) -> tuple[str, str]:
    """Returns the module and the name in it that refer to the program or, after `bind`, to the one it was made from."""
    body = program._body
    if hasattr(body, "__self__"):
        raise _cannot_travel(program, "is a method of an object, and objects are not sent; make it a function")
    module_name, qualname = str(body.__module__), str(body.__qualname__)
    if _has_body(_lookup(sys.modules.get(module_name), qualname), body):
        return module_name, qualname
    for name, module in list(sys.modules.items()):  # an agent, or a program under another name
        for variable, value in list(getattr(module, "__dict__", {}).items()):
            if _has_body(value, body):
                return name, variable
    raise _cannot_travel(program, "has no name in a module; define it at the top level of a file or module")


def _main_module_or_file(program: Program[Any]) -> str | Path:
    """Returns the name of the module that `python -m` runs, or else the file of the script."""
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None and spec.name != "__main__":
        return str(spec.name)
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).is_file():
        raise _cannot_travel(program, "is defined in an interactive session; save it in a file, and import it")
    return Path(file)


def _cannot_travel(program: Program[Any], reason: str) -> InputError:
    return InputError(f"program {program.name!r} cannot run on a cluster: it {reason}")


def _is_program(value: object) -> bool:
    """Whether it is a Program, by name: program.py imports this module."""
    return any((kind.__module__, kind.__name__) == ("plait.lang.program", "Program") for kind in type(value).__mro__)


def _has_body(value: Any, body: object) -> bool:
    return _is_program(value) and value._body is body


def _lookup(holder: Any, qualname: str) -> Any:
    for part in qualname.split("."):
        holder = getattr(holder, part, None)
    return holder


# -- on the actor ---------------------------------------------------------------------------------


def import_program(reference: ProgramReference) -> Program[Any]:
    """Returns the program of a reference. Raises InputError if it is not there, and what the file itself raises."""
    with _importing():
        module = _import_file(reference) if reference.file is not None else _import_module(reference)
    program: Program[Any] = _lookup(module, reference.qualname)
    if not _is_program(program):
        raise InputError(f"there is no program {reference} on this machine; its file may differ from that of the batch")
    return program


def check_not_importing() -> None:
    """Raises InputError in an actor that is importing a program: its file starts a batch when it is imported."""
    if _is_importing:
        raise InputError(
            "the program's file runs a batch when the actors import it: put run_batch under if __name__ == '__main__':"
        )


@contextmanager
def _importing() -> Iterator[None]:
    global _is_importing
    _is_importing = True
    try:
        yield
    finally:
        _is_importing = False


def _import_module(reference: ProgramReference) -> Any:
    assert reference.module is not None
    try:
        return importlib.import_module(reference.module)
    except ModuleNotFoundError as error:
        text = f"the machine of the actor cannot import {reference.module}: {error}"
        raise InputError(f"{text}; install it on all machines, or give Cluster(working_dir=...) its folder") from None


def _import_file(reference: ProgramReference) -> Any:
    assert reference.file is not None
    path = Path(reference.file)
    if not path.is_file():
        text = f"there is no file {path} on the machine of the actor"
        raise InputError(f"{text}; copy it to the same path on all machines, or give Cluster(working_dir=...)")
    sys.path.insert(0, str(path.resolve().parent))  # as for a script
    spec = importlib.util.spec_from_file_location(FILE_MODULE, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is not a Python file; its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[FILE_MODULE] = module
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        raise InputError(f"{path} cannot be imported on the machine of the actor: {error}") from error
    return module
